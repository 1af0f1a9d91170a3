"""A Redis under TLS, by its URL: a real Valkey behind a TLS listener, since the packaged server has none of its own."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
from certificates_kit import Pki
from patient_redis import patient_connections, patient_index
from valkey_cluster import ValkeyCluster

from headrace.admin.create_certificates import CertificatePaths
from headrace.core.block import BlockHash, HolderId, NamespaceId, Tier
from headrace.core.clock import SystemClock
from headrace.core.errors import IndexUnavailable
from headrace.core.members import NO_MATCH

BLOCK = BlockHash(b"0123456789abcdef")


@asynccontextmanager
async def tls_in_front(url: str, shown: CertificatePaths, callers: CertificatePaths | None) -> AsyncIterator[int]:
    """The port of a listener with this certificate that passes all on to the server in plain text."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.cert_file, shown.key_file)
    if callers is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=callers.ca_file)
    address = urlsplit(url)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(address.hostname, address.port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ping(url: str) -> bytes:
    connections = patient_connections(url, connections_max=1, clock=SystemClock())
    try:
        async with connections.call() as call:
            (reply,) = await call.round_trip(("PING",))
        return reply
    finally:
        await connections.close()


async def test_a_rediss_url_names_the_authority_and_the_certificate_to_show(pki: Pki, valkey_url: str):
    """Fails when the URL's files are not what the connection goes by."""
    async with tls_in_front(valkey_url, pki.good, None) as port:
        assert await ping(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={pki.good.ca_file}") == b"PONG"
    async with tls_in_front(valkey_url, pki.good, pki.caller) as port:
        shown = f"ssl_certfile={pki.caller.cert_file}&ssl_keyfile={pki.caller.key_file}"
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={pki.good.ca_file}"
        assert await ping(f"{url}&{shown}") == b"PONG"
        with pytest.raises(IndexUnavailable):
            await ping(url)


@pytest.mark.parametrize(
    ("shown", "trusted", "told"),
    [
        ("good", "stranger", "CERTIFICATE_VERIFY_FAILED"),
        ("good", None, "CERTIFICATE_VERIFY_FAILED"),  # of no authority that the machine trusts
        ("elsewhere", "good", "CERTIFICATE_VERIFY_FAILED"),  # another host's
        ("expired", "good", "certificate has expired"),
    ],
)
async def test_a_redis_whose_certificate_is_wrong_is_not_talked_to(
    pki: Pki, valkey_url: str, shown: str, trusted: str | None, told: str
):
    """Fails when rediss:// encrypts for whoever answers. The index is then away, which costs hits."""
    async with tls_in_front(valkey_url, getattr(pki, shown), None) as port:
        authority = f"?ssl_ca_certs={getattr(pki, trusted).ca_file}" if trusted else ""
        with pytest.raises(IndexUnavailable, match=told):
            await ping(f"rediss://127.0.0.1:{port}/0{authority}")


@asynccontextmanager
async def tls_in_front_of_each(cluster: ValkeyCluster, shown: CertificatePaths) -> AsyncIterator[list[int]]:
    """The ports of such listeners, by which the servers know each other meanwhile."""
    async with AsyncExitStack() as fronts:
        urls = [f"redis://127.0.0.1:{node.port}" for node in cluster.primaries]
        ports = [await fronts.enter_async_context(tls_in_front(url, shown, None)) for url in urls]
        await asyncio.to_thread(cluster.announce, ports)
        try:
            yield ports
        finally:
            await asyncio.to_thread(cluster.announce, [node.port for node in cluster.primaries])


async def test_every_server_of_a_cluster_is_asked_under_tls_also_those_that_the_url_does_not_name(
    pki: Pki, valkey_cluster: ValkeyCluster
):
    """Fails when a connection to a server that another one told of is in plain text, or to whoever answers there."""
    async with tls_in_front_of_each(valkey_cluster, pki.good) as ports:
        url = f"rediss+cluster://127.0.0.1:{ports[0]}?ssl_ca_certs="
        index = patient_index(f"{url}{pki.good.ca_file}")
        for number in range(16):  # shards on all servers, and members
            namespace = NamespaceId(f"{number:032x}")
            await index.register(
                holder=HolderId("n"), incarnation=1, tier=Tier.HOST, namespace=namespace, blocks=[BLOCK]
            )
            assert await index.longest_prefix(namespace, (BLOCK,)) == NO_MATCH
        await index.close()
        index = patient_index(f"{url}{pki.stranger.ca_file}")
        with pytest.raises(IndexUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await index.longest_prefix(NamespaceId("0" * 32), (BLOCK,))
        await index.close()
