"""Certificates are replaced while everything runs: new connections see the new ones, and what runs ends unharmed."""

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from certificates_kit import LOCAL, Pki

from headrace.admin.create_certificates import CertificatePaths, create_certificates
from headrace.client import HeadraceClient
from headrace.transfer.channels import Channels, bind_server, build_server, open_blocking_channel
from headrace.transfer.https_context import HttpsContext
from headrace.transfer.tls_files import Tls, TlsFiles


def tls_of(paths: CertificatePaths, *, mutual: bool = True) -> Tls:
    return Tls(TlsFiles(paths.cert_file, paths.key_file, paths.ca_file if mutual else "", mutual=mutual))


def renew(paths: CertificatePaths) -> bytes:
    """A new certificate of the same authority, in the same files; what a peer then sees."""
    create_certificates(Path(paths.cert_file).parent, hosts=LOCAL, days=3)
    return pem(paths.cert_file)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def write(path: str, content: bytes) -> None:
    """Replaced, and not written over: two writes within one tick of the file system's clock look alike."""
    Path(path + ".new").write_bytes(content)
    os.replace(path + ".new", path)


def copy(source: str, target: str) -> None:
    write(target, read(source))


def pem(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text(encoding="ascii"))


@dataclass
class Server:
    """One unary call, which answers the client's certificate, and one stream, which goes on when it is told."""

    port: int = 0
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def whoami(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        (shown,) = context.auth_context()["x509_pem_cert"]
        return ssl.PEM_cert_to_DER_cert(shown.decode())

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        await self.goes_on.wait()
        yield b"ended"


@asynccontextmanager
async def serving(tls: Tls) -> AsyncIterator[Server]:
    found, server = Server(), build_server()
    handlers = {
        "WhoAmI": grpc.unary_unary_rpc_method_handler(found.whoami),
        "Stream": grpc.unary_stream_rpc_method_handler(found.stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    found.port = bind_server(server, "127.0.0.1:0", tls=tls)
    await server.start()
    try:
        yield found
    finally:
        await server.stop(0)


def certificate_at(port: int, paths: CertificatePaths, *, alpn: tuple[str, ...] = ("h2",)) -> bytes:
    """What a new connection is shown."""
    context = ssl.create_default_context(cafile=paths.ca_file)
    context.load_cert_chain(paths.cert_file, paths.key_file)
    context.set_alpn_protocols(list(alpn))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return shown


async def test_new_connections_are_shown_the_new_certificate_and_a_running_stream_ends_unharmed(own_pki: Pki):
    """Fails when a server keeps what it started with, or a renewal cuts what runs."""
    paths = own_pki.good
    async with serving(tls_of(paths)) as server:
        channels = Channels(tls_of(paths))
        address = f"127.0.0.1:{server.port}"
        stream = channels.to(address).unary_stream("/t.T/Stream")(b"", timeout=120)
        assert await stream.read() == b"begun"
        old = pem(paths.cert_file)
        assert await asyncio.to_thread(certificate_at, server.port, paths) == old
        new = renew(paths)
        assert new != old
        assert await asyncio.to_thread(certificate_at, server.port, paths) == new
        # The client's next call goes by a new connection, on which it shows its new certificate.
        assert await channels.to(address).unary_unary("/t.T/WhoAmI")(b"", timeout=60) == new
        server.goes_on.set()
        assert await stream.read() == b"ended"
        assert await stream.code() is grpc.StatusCode.OK
        await channels.close()


async def test_a_stub_made_before_a_renewal_shows_the_new_certificate_and_the_old_channel_is_closed(own_pki: Pki):
    """Stubs are kept for as long as a node lives. Fails when they keep their first channel, or it stays open."""
    paths = own_pki.good
    async with serving(tls_of(paths)) as server:
        channels = Channels(tls_of(paths))
        channel = channels.to(f"127.0.0.1:{server.port}")
        whoami = channel.unary_unary("/t.T/WhoAmI")
        assert await whoami(b"", timeout=60) == pem(paths.cert_file)
        before = channel.now()
        new = renew(paths)
        assert await whoami(b"", timeout=60) == new
        async with asyncio.timeout(60):
            while before.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        await channels.close()
        with pytest.raises(grpc.aio.UsageError):
            await whoami(b"", timeout=60)


async def test_an_authority_is_replaced_in_steps_without_a_moment_in_which_somebody_is_refused(own_pki: Pki):
    """Both authorities trusted, then new certificates, then the old authority out. Fails when the files of the
    authorities are not read again."""
    paths, other = own_pki.good, own_pki.stranger
    async with serving(tls_of(paths)) as server:
        channels = Channels(tls_of(paths))
        whoami = channels.to(f"127.0.0.1:{server.port}").unary_unary("/t.T/WhoAmI")
        assert await whoami(b"", timeout=60) == pem(paths.cert_file)
        old_ca, new_ca = read(paths.ca_file), read(other.ca_file)
        write(paths.ca_file, old_ca + new_ca)
        assert await whoami(b"", timeout=60) == pem(paths.cert_file)
        copy(other.key_file, paths.key_file)  # for a moment the two do not fit, and the last good ones serve
        assert await whoami(b"", timeout=60) != pem(other.cert_file)
        copy(other.cert_file, paths.cert_file)
        assert await whoami(b"", timeout=60) == pem(other.cert_file)
        write(paths.ca_file, new_ca)
        assert await whoami(b"", timeout=60) == pem(other.cert_file)
        # The old authority counts no more.
        strangers = Channels(own_pki.unchecked(own_pki.elsewhere))
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await strangers.to(f"127.0.0.1:{server.port}").unary_unary("/t.T/WhoAmI")(b"", timeout=60)
        await strangers.close()
        await channels.close()


@pytest.mark.parametrize("wrong", ["key of another", "expired", "of another authority", "half a file", "gone"])
async def test_files_that_are_wrong_are_not_taken_and_the_log_says_why(
    own_pki: Pki, wrong: str, caplog: pytest.LogCaptureFixture
):
    """Fails when a mistake in a renewal takes a running system down, or nobody hears of it."""
    paths = own_pki.good
    tls = tls_of(paths)
    old = tls.current()
    if wrong == "key of another":
        copy(own_pki.stranger.key_file, paths.key_file)
    elif wrong == "expired":
        for name in ("cert_file", "key_file"):
            copy(getattr(own_pki.expired, name), getattr(paths, name))
    elif wrong == "of another authority":
        for name in ("cert_file", "key_file"):
            copy(getattr(own_pki.stranger, name), getattr(paths, name))
    elif wrong == "half a file":
        write(paths.cert_file, old.cert[: len(old.cert) // 2])
    else:
        os.unlink(paths.cert_file)
    assert tls.current() is old
    assert tls.current() is old
    if wrong == "gone":
        assert "cannot be read" in caplog.text
    else:
        assert caplog.text.count("the last good ones stay in force") == 1, "told once for each change"
    async with serving(tls) as server:
        new = renew(paths)
        assert await asyncio.to_thread(certificate_at, server.port, paths) == new


def test_a_blocking_client_follows_its_files_and_its_streams_end_on_the_old_connection(own_pki: Pki):
    """Fails when a client that runs for months keeps an authority that was replaced, or a renewal cuts its stream."""
    paths = own_pki.good
    ready, done, found = threading.Event(), threading.Event(), {}

    def serve() -> None:
        async def main() -> None:
            async with serving(tls_of(paths)) as server:
                found.update(server=server, loop=asyncio.get_running_loop(), port=server.port)
                ready.set()
                await asyncio.to_thread(done.wait)

        asyncio.run(main())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(60)
        channel = open_blocking_channel(f"127.0.0.1:{found['port']}", tls=tls_of(paths), options=())
        stream = channel.unary_stream("/t.T/Stream")(b"", timeout=120)
        assert next(stream) == b"begun"
        whoami = channel.unary_unary("/t.T/WhoAmI")
        assert whoami(b"", timeout=60) == pem(paths.cert_file)
        new = renew(paths)
        assert whoami(b"", timeout=60) == new
        found["loop"].call_soon_threadsafe(found["server"].goes_on.set)
        assert list(stream) == [b"ended"]
        channel.close()
        with pytest.raises(ValueError, match="closed"):
            whoami(b"", timeout=60)
    finally:
        done.set()
        thread.join(60)


def test_closing_a_client_that_never_called_opens_nothing(own_pki: Pki):
    HeadraceClient("127.0.0.1:9", tls_ca_file=own_pki.good.ca_file).close()


async def test_an_https_server_shows_the_new_certificate_to_new_connections(own_pki: Pki):
    """Fails when the context keeps what it was made with, as Serve's and uvicorn's own do."""
    paths = own_pki.good

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=HttpsContext(tls_of(paths, mutual=False)))
    port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=paths.ca_file)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    old = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert old == pem(paths.cert_file)
    new = renew(paths)
    assert await asyncio.to_thread(certificate_at, port, paths) == new
    writer.write(b"still here\n")
    assert await reader.readline() == b"still here\n"
    writer.close()
    copy(own_pki.stranger.key_file, paths.key_file)
    assert await asyncio.to_thread(shown_to_a_caller, port, trusting) == new
    server.close()


def shown_to_a_caller(port: int, context: ssl.SSLContext) -> bytes | None:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        return connection.getpeercert(binary_form=True)
