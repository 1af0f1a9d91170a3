"""Claims whose reply or release was lost on the way: the node ends them when it is told, not when they expire."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from store_calls_kit import CLOCK, deadline, publish
from store_kit import make_header, make_prompt

from headrace.core.errors import CacheFault
from headrace.core.limits import (
    CLAIM_NAMES_MAX,
    LEASE_TTL_MS,
    LOST_CLAIMS_MAX,
    LOST_CLAIMS_RETRY_MS,
)
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import BlockSink, BlockSource
from headrace.index.memory_index import MemoryMembership
from headrace.store.store_node import StoreNode
from headrace.transfer.lost_claims import LostClaims
from headrace.transfer.named_claims import NamedClaims
from headrace.transfer.store_nodes import StoreNodeTable
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc, block_store_pb2, block_store_pb2_grpc

PROMPT = make_prompt(1, 4)
# Many tries, on a busy machine. Without them a lease ends by its time, which is longer.
SETTLED_S = 50 * LOST_CLAIMS_RETRY_MS / 1000
assert SETTLED_S < LEASE_TTL_MS / 1000


@asynccontextmanager
async def table_of(record: StoreNodeRecord, *, near: bool) -> AsyncIterator[StoreNodeTable]:
    """A worker's table of nodes with this one node in it, on the node's host or on another."""
    membership = MemoryMembership(CLOCK)
    await membership.announce(record, ttl_ms=600_000)
    host = record.host if near else "elsewhere"
    table = StoreNodeTable(host=host, membership=membership, clock=CLOCK, report_fault=lambda fault: None)
    await table.start()
    try:
        yield table
    finally:
        await table.stop()


async def cut_at_every_moment(call: Callable[[], Awaitable[object]]) -> int:
    """Begin the call again and again, each time cancelled a little later; how often it was cut before its answer."""
    cut = 0
    for step in range(80):
        task = asyncio.ensure_future(call())
        for _ in range(step % 20):
            await asyncio.sleep(0)
        await asyncio.sleep(step // 20 * 0.000_5)
        task.cancel()
        await asyncio.wait([task])
        cut += task.cancelled()
    return cut


async def until_given_back(node: StoreNode) -> None:
    """Until nobody claims anything, for which no claim had to run out."""
    async with asyncio.timeout(60):
        while (stat := node.stat()).leased_blocks or stat.reserved_blocks:  # noqa: ASYNC110 (a node has no event for this)
            await asyncio.sleep(0.02)
    assert (node.counters.expired_leases, node.counters.expired_reservations) == (0, 0)


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gRPC"])
async def test_a_lease_cancelled_at_any_moment_is_given_back_within_seconds(nodes, near: bool) -> None:
    """Fails when a lease whose reply nobody read keeps its blocks until LEASE_TTL_MS has passed."""
    async with nodes.inside() as service, table_of(service.record, near=near) as table:
        await publish(nodes.grpc(service.record), PROMPT, range(4))
        source = table.local() if near else table.remote(service.record.node_id)

        async def lease_and_release(source: BlockSource) -> None:
            lease = await source.lease_prefix(PROMPT.namespace, PROMPT.chain, first_block=0, deadline=deadline())
            await source.release(lease)

        cut = await cut_at_every_moment(lambda: lease_and_release(source))
        assert cut > 10
        await until_given_back(service.node)
        await lease_and_release(source)
        service.node.check_integrity()


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gRPC"])
async def test_slots_of_a_reserve_call_cancelled_at_any_moment_are_given_back_within_seconds(nodes, near: bool) -> None:
    """Fails when slots whose reply nobody read stay reserved until RESERVATION_TTL_MS has passed."""
    headers = [make_header(PROMPT, i) for i in range(4)]
    async with nodes.inside() as service, table_of(service.record, near=near) as table:

        async def reserve_and_abort(sink: BlockSink) -> None:
            for outcome in await sink.reserve(headers, deadline=deadline()):
                with suppress(AttributeError):  # a slot that an earlier call still has
                    await sink.abort(outcome)

        cut = await cut_at_every_moment(lambda: reserve_and_abort(table.sink()))
        assert cut > 10
        await until_given_back(service.node)
        assert await publish(table.sink(), PROMPT, range(4)) == 4
        service.node.check_integrity()


async def test_a_release_that_the_node_could_not_take_is_told_again(nodes) -> None:
    """Fails when one unanswered release leaves its lease standing: the node was paused for longer than a release may
    take, and nobody asks it for anything after that."""
    node = await nodes.start()
    await publish(nodes.grpc(node.record), PROMPT, range(4))
    admin = admin_pb2_grpc.CacheAdminStub(nodes.channels.to(node.record.address))

    async def leased() -> int:
        return (await admin.Stat(admin_pb2.StatRequest())).holders[0].leased_blocks

    async with table_of(node.record, near=True) as table:
        source = table.local()
        lease = await source.lease_prefix(PROMPT.namespace, PROMPT.chain, first_block=0, deadline=deadline())
        assert await leased() == 4
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            with suppress(TimeoutError, CacheFault):
                async with asyncio.timeout(0.3):
                    await source.release(lease)
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        end_s = time.monotonic() + SETTLED_S
        while await leased():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)


async def test_stopping_a_worker_gives_back_what_its_calls_lost(nodes) -> None:
    """Fails when a worker that stops right after a cancelled call leaves the claim to its expiry."""
    async with nodes.inside() as service:
        await publish(nodes.grpc(service.record), PROMPT, range(4))
        async with table_of(service.record, near=True) as table:
            source = table.local()
            lease = await source.lease_prefix(PROMPT.namespace, PROMPT.chain, first_block=0, deadline=deadline())
            release = asyncio.ensure_future(source.release(lease))
            await asyncio.sleep(0)
            release.cancel()
            await asyncio.wait([release])
            assert service.node.stat().leased_blocks == 4
        assert service.node.stat().leased_blocks == 0


async def test_a_node_that_says_something_new_is_told_of_what_was_lost_before(nodes) -> None:
    """Fails when the adapters of a node's earlier record take their lost claims along: a node whose index was away for
    long takes a new incarnation without a restart."""
    async with nodes.inside() as service:
        await publish(nodes.grpc(service.record), PROMPT, range(4))
        membership = MemoryMembership(CLOCK)
        await membership.announce(service.record, ttl_ms=600_000)
        table = StoreNodeTable(
            host=service.record.host, membership=membership, clock=CLOCK, report_fault=lambda fault: None
        )
        await table.refresh()  # not started: nobody ends lost claims but the refresh below
        source = table.local()

        async def lease() -> None:
            held = await source.lease_prefix(PROMPT.namespace, PROMPT.chain, first_block=0, deadline=deadline())
            await source.release(held)

        await cut_at_every_moment(lease)
        await membership.announce(replace(service.record, incarnation=service.record.incarnation + 1), ttl_ms=600_000)
        await table.refresh()
        await until_given_back(service.node)
        await table.stop()


async def test_a_claim_that_was_ended_before_it_arrives_is_not_made(nodes) -> None:
    """Fails when the end of a claim that overtakes its request on the way is forgotten, or a name is used twice."""
    async with nodes.inside() as service:
        await publish(nodes.grpc(service.record), PROMPT, range(2))
        stub = block_store_pb2_grpc.BlockStoreStub(nodes.channels.to(service.record.address))
        wanted = block_store_pb2.LeaseRequest(
            namespace=PROMPT.namespace,
            chain=b"".join(PROMPT.chain),
            hash_bytes=len(PROMPT.chain[0]),
            claim_name="a",
        )
        await stub.EndClaims(block_store_pb2.EndClaimsRequest(names=["a", "never heard of"]))
        assert (await stub.Lease(wanted)).lease_id == ""
        wanted.claim_name = "b"
        assert (await stub.Lease(wanted)).lease_id != ""
        assert (await stub.Lease(wanted)).lease_id == ""  # twice
        assert service.node.stat().leased_blocks == 2
        await stub.EndClaims(block_store_pb2.EndClaimsRequest(names=["b", ""]))
        assert service.node.stat().leased_blocks == 0
        wanted.claim_name = ""  # a caller that names none, and does not pay for another's ending the name ""
        assert (await stub.Lease(wanted)).lease_id != ""


def test_names_are_remembered_up_to_their_bounds() -> None:
    """Fails when a caller or a node whose other side is away for ever remembers without end."""
    named, lost = NamedClaims(), LostClaims(CLOCK)
    for number in range(CLAIM_NAMES_MAX):
        named.made(str(number), [f"r{number}"])
    assert named.end(str(CLAIM_NAMES_MAX // 2 - 2)) == ()  # a name and an id each: the older half is forgotten
    assert named.end(str(CLAIM_NAMES_MAX - 1)) == (f"r{CLAIM_NAMES_MAX - 1}",)
    for number in range(2 * LOST_CLAIMS_MAX):
        lost.add(str(number))
    assert lost.names() == tuple(str(number) for number in range(LOST_CLAIMS_MAX, 2 * LOST_CLAIMS_MAX))
    lost.forget(lost.names())
    assert lost.names() == ()
