"""Store nodes, workers and gateways under mutual TLS: real sockets, real handshakes, each path between our own parts.

A path passes when what goes by it is right, and when who may not go by it is refused.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificates_kit import Pki
from store_kit import fill, make_header, make_prompt, payload_of
from tiny_gateway import NODE, make_worker_record, tiny_gateway

from headrace.blocks.claims import SlotReserved
from headrace.config import NetworkSettings, StoreSettings
from headrace.core.block import HashedPrompt, payload_digest
from headrace.core.clock import Deadline, SystemClock
from headrace.core.errors import InvalidRequest, StoreUnavailable
from headrace.core.ports import Reservation
from headrace.gateway.admin_grpc import CacheAdminRpc
from headrace.gateway.peer_gateways import PeerGateways
from headrace.gateway.refuse_call import refuse_call
from headrace.gateway.serve_grpc import serve_grpc
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.service import StoreNodeService
from headrace.telemetry.metrics import CERTIFICATE_ENDS, Metrics
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.https_context import metrics_context
from headrace.transfer.store_nodes import StoreNodeTable
from headrace.transfer.tls_files import Tls
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

CLOCK = SystemClock()


def deadline() -> Deadline:
    return Deadline.after(60, CLOCK)


class Parts:
    """What one test starts; all of it ends with the test."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.membership = MemoryMembership(CLOCK)
        self._directory = directory
        self._stack = stack

    async def store_node(
        self, tls: Tls | None, node_id: str = "n", *, metrics: Metrics | None = None
    ) -> StoreNodeService:
        settings = StoreSettings(node_id=node_id, arena_mb=1, arena_dir=str(self._directory))
        index = MemoryIndex(self.membership)
        service = StoreNodeService(
            settings, index=index, membership=self.membership, clock=CLOCK, metrics=metrics, tls=tls
        )
        await service.start()
        self._stack.push_async_callback(service.stop, remove_arena=True)
        return service

    def channels(self, tls: Tls | None) -> Channels:
        made = Channels(tls)
        self._stack.push_async_callback(made.close)
        return made

    def store(self, node: StoreNodeService, tls: Tls | None, *, address: str = "") -> GrpcStore:
        record = replace(node.record, address=address or node.record.address)
        return GrpcStore(record, self.channels(tls), CLOCK)


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        yield Parts(tmp_path, stack)


def keep(node: StoreNodeService, prompt: HashedPrompt) -> None:
    for outcome in node.node.reserve([make_header(prompt, i) for i in range(len(prompt.chain))]):
        assert isinstance(outcome, SlotReserved)
        fill(outcome)
        node.node.commit(outcome.reservation_id, payload_digest(outcome.buffer))


async def read(store: Any, prompt: HashedPrompt) -> list[bytes]:
    lease = await store.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
    found = [bytes(payload) async for payload in store.fetch_blocks(lease, deadline=deadline())]
    await store.release(lease)
    return found


async def refusal(store: GrpcStore) -> str:
    """Why a call fails; one that took too long on a busy machine is made again."""
    while True:
        with pytest.raises(StoreUnavailable) as refused:
            await read(store, make_prompt(1, 1))
        if "DEADLINE_EXCEEDED" not in str(refused.value):
            return str(refused.value)


def payloads(prompt: HashedPrompt) -> list[bytes]:
    return [payload_of(make_header(prompt, i)) for i in range(len(prompt.chain))]


async def test_a_worker_writes_to_a_store_node_and_reads_it_back(parts: Parts, pki: Pki):
    """Fails when one of the calls of the data path does not go by the channel with certificates."""
    node = await parts.store_node(pki.tls(pki.good))
    store, prompt = parts.store(node, pki.tls(pki.good)), make_prompt(1, 5)
    for position in range(5):
        header = make_header(prompt, position)
        (outcome,) = await store.reserve([header], deadline=deadline())
        assert isinstance(outcome, Reservation)
        outcome.buffer[:] = payload_of(header)
        await store.commit(outcome, payload_xxh3=payload_digest(outcome.buffer), deadline=deadline())
    assert await read(store, prompt) == payloads(prompt)


async def test_a_workers_table_of_nodes_goes_by_its_certificate(parts: Parts, pki: Pki):
    """Fails when the table opens channels of its own, in plain text."""
    node, prompt = await parts.store_node(pki.tls(pki.good)), make_prompt(1, 2)
    keep(node, prompt)
    await parts.membership.announce(node.record, ttl_ms=60_000)
    faults: list[Any] = []
    table = StoreNodeTable(
        host="another",
        membership=parts.membership,
        clock=CLOCK,
        report_fault=faults.append,
        tls=pki.tls(pki.good),
    )
    await table.start()
    try:
        remote = table.remote("n")
        assert remote is not None
        assert await read(remote, prompt) == payloads(prompt)
    finally:
        await table.stop()


@pytest.mark.parametrize("shown", [None, "stranger", "expired", "plain text"])
async def test_who_has_no_certificate_of_the_authority_is_refused_by_a_store_node(
    parts: Parts, pki: Pki, shown: str | None
):
    """Fails when the node asks for no certificate, takes any, or answers plain text."""
    node, prompt = await parts.store_node(pki.tls(pki.good)), make_prompt(1, 1)
    keep(node, prompt)
    given = {None: pki.tls(None), "plain text": None}
    tls = given[shown] if shown in given else pki.unchecked(getattr(pki, shown))
    before = node.node.stat().lookups_tokens
    assert "do both sides have TLS" in await refusal(parts.store(node, tls))
    assert node.node.stat().lookups_tokens == before, "the call reached the node"
    assert await read(parts.store(node, pki.tls(pki.good)), prompt) == payloads(prompt)


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        ("expired", "its certificate has expired"),
        ("stranger", "its certificate is not of an authority in tls_ca_file"),
        ("elsewhere", "its certificate does not name it"),
        ("plain text", "it does not speak TLS"),
    ],
)
async def test_a_store_node_with_a_wrong_certificate_gets_nothing_from_a_worker(
    parts: Parts, pki: Pki, shown: str, told: str
):
    """Fails when a worker does not check whom it sends KV to; the reason must be readable where the fault is."""
    node = await parts.store_node(None if shown == "plain text" else pki.unchecked(getattr(pki, shown)))
    assert told in await refusal(parts.store(node, pki.tls(pki.good)))


async def test_connections_that_a_store_node_refuses_are_counted_with_all_that_begin(parts: Parts, pki: Pki):
    """gRPC tells nobody that a handshake failed. Fails when an attack on the port shows nowhere."""
    metrics = Metrics()
    node = await parts.store_node(pki.tls(pki.good), metrics=metrics)
    begun = lambda: metrics.registry.get_sample_value("headrace_tls_connections_total")  # noqa: E731
    assert begun() == 0
    await read(parts.store(node, pki.tls(pki.good)), make_prompt(1, 1))
    before = begun()
    assert before >= 1
    await refusal(parts.store(node, None))
    assert begun() > before


async def test_a_store_node_tells_when_its_certificate_ends(tmp_path: Path, pki: Pki):
    """Fails when whoever is to renew it has nothing to see."""
    network = NetworkSettings(tls_cert_file=pki.good.cert_file, tls_key_file=pki.good.key_file)
    membership, metrics = MemoryMembership(CLOCK), Metrics()
    service = StoreNodeService(
        StoreSettings(node_id="n", arena_mb=1, arena_dir=str(tmp_path)),
        index=MemoryIndex(membership),
        membership=membership,
        clock=CLOCK,
        metrics=metrics,
        tls=pki.tls(pki.good),
        metrics_context=metrics_context(network),
    )
    await service.start()
    try:
        assert metrics.registry.get_sample_value(CERTIFICATE_ENDS) > time.time()
    finally:
        await service.stop(remove_arena=True)


async def test_a_node_drains_into_its_peer(parts: Parts, pki: Pki):
    """Fails when a node opens its channels to peers in plain text."""
    old, new = [await parts.store_node(pki.tls(pki.good), node_id) for node_id in ("old", "new")]
    prompt = make_prompt(1, 6)
    keep(old, prompt)
    stub_of: Any = admin_pb2_grpc.NodeAdminStub
    order = admin_pb2.DrainRequest(
        peers=[admin_pb2.DrainPeer(node_id="new", address=new.record.address)], who="somebody"
    )
    async with asyncio.timeout(60):
        async for progress in stub_of(parts.channels(pki.tls(pki.good)).to(old.record.address)).Drain(order):
            last = progress
    assert (last.state, last.error, last.moved_blocks) == ("drained", "", 6)
    assert await read(parts.store(new, pki.tls(pki.good)), prompt) == payloads(prompt)


async def test_a_gateway_asks_a_store_node_for_what_it_holds(parts: Parts, pki: Pki, model_path: str):
    """Fails when the admin's path from gateway to node has no certificate; a node that refuses it is told of."""
    node, prompt = await parts.store_node(pki.tls(pki.good)), make_prompt(1, 3)
    keep(node, prompt)
    for tls, error in ((pki.tls(pki.good), ""), (None, "does not answer")):
        async with gateway_over(node, model_path, channels=parts.channels(tls)) as address:
            stub_of: Any = admin_pb2_grpc.CacheAdminStub
            reply = await stub_of(parts.channels(None).to(address)).Stat(admin_pb2.StatRequest(), timeout=60)
        (row,) = [stat for stat in reply.holders if stat.holder == "node:n"]
        assert (row.committed_blocks, bool(row.error)) == ((3, False) if not error else (0, True)), row


@asynccontextmanager
async def gateway_over(node: StoreNodeService, model_path: str, *, channels: Channels) -> AsyncIterator[str]:
    """The address of a gateway that knows this node, and calls it by these channels."""
    async with tiny_gateway(make_worker_record("w"), model_path=model_path) as gateway:
        await gateway.membership.withdraw(NODE)
        await gateway.membership.announce(node.record, ttl_ms=60_000)
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)


async def test_gateways_ask_each_other_and_no_stranger_is_answered(parts: Parts, pki: Pki, model_path: str):
    """Fails when the port between gateways takes callers without a certificate, or gateways show none."""
    unknown = InvalidRequest("nobody remembers it", param="request_id")
    async with tiny_gateway(make_worker_record("w"), model_path=model_path) as gateway, AsyncExitStack() as stack:
        remembering = CacheAdminRpc(gateway.service, channel_to=parts.channels(None).to, refuse=refuse_call)
        peers = {}
        for name, tls in (("a", pki.tls(pki.good)), ("b", pki.tls(pki.good)), ("stranger", None)):
            peers[name] = PeerGateways(
                parts.membership, gateway_id=name, host="127.0.0.1", host_id="h", clock=CLOCK, tls=tls
            )
            if name != "stranger":
                await peers[name].start(remembering)
                stack.push_async_callback(peers[name].stop)
                await peers[name].step()
        asked = admin_pb2.ExplainRouteRequest(request_id="r-1")
        # An answer of the other gateway: it does not remember the request either.
        with pytest.raises(InvalidRequest, match=r"nor among those of 1 other gateways$"):
            await peers["a"].ask("ExplainRoute", asked, authorization=None, unknown=unknown)
        with pytest.raises(InvalidRequest, match=r"gateway a does not answer.*gateway b does not answer"):
            await peers["stranger"].ask("ExplainRoute", asked, authorization=None, unknown=unknown)


async def test_tls_older_than_1_2_is_refused(parts: Parts, pki: Pki):
    node = await parts.store_node(pki.tls(pki.good))
    host, _, port = node.record.address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.wait_for(asyncio.open_connection(host, int(port), ssl=context), 60)
