"""Store nodes over real gRPC and real shared memory, in this process, with the node's books in view."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from store_calls_kit import CLOCK, deadline, publish, read
from store_kit import LAYOUT, StoreKit, make_header, make_kit, make_prompt, payload_of

from headrace.core.block import payload_digest
from headrace.core.errors import BlockCorrupt, BlockMissing, LeaseExpired, StoreUnavailable
from headrace.core.generation import EvictSelector
from headrace.core.limits import FETCH_CHUNK_BYTES
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import AlreadyStored, Lease, NotStored, Reservation
from headrace.transfer.channels import build_server
from headrace.transfer.serve_blocks import serve_blocks
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc, block_store_pb2, block_store_pb2_grpc

# One block of this layout is longer than a chunk, and no multiple of one.
LONG = replace(LAYOUT, num_layers=FETCH_CHUNK_BYTES // LAYOUT.block_bytes + 3)
FETCH, FILL = "/headrace.v1.BlockStore/Fetch", "/headrace.v1.BlockStore/Fill"
WRITER = """
import asyncio, sys
sys.path.insert(0, {kit!r})
from store_calls_kit import *
from store_kit import *
from headrace.transfer.channels import Channels
from headrace.transfer.shared_memory import SharedMemoryStore
from headrace.core.members import StoreNodeRecord
async def main():
    store = SharedMemoryStore({record!r}, Channels(), CLOCK)
    await publish(store, make_prompt(1, 3), [0])
    first, second = await store.reserve([make_header(make_prompt(1, 3), i) for i in (1, 2)], deadline=deadline())
    first.buffer[:100] = bytes(100)
    print("half way", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def kit() -> StoreKit:
    return make_kit()


async def until_none_is_leased(node) -> None:
    """A release is on its way when it returns; readers do not wait for the node's answer."""
    async with asyncio.timeout(60):
        while node.stat().leased_blocks:  # noqa: ASYNC110 (a node has no event for this)
            await asyncio.sleep(0.005)


async def test_a_block_published_either_way_is_read_byte_equal_either_way(nodes) -> None:
    async with nodes.inside() as service:
        shared, remote = nodes.shared_memory(service.record), nodes.grpc(service.record)
        by_memory, by_grpc = make_prompt(1, 4), make_prompt(2, 4)
        assert await publish(shared, by_memory, range(4)) == 4
        assert await publish(remote, by_grpc, range(4)) == 4
        for prompt in (by_memory, by_grpc):
            expected = [payload_of(make_header(prompt, i)) for i in range(4)]
            assert await read(shared, prompt) == await read(remote, prompt) == expected
        assert await read(remote, by_memory, first_block=3) == [payload_of(make_header(by_memory, 3))]
        service.node.check_integrity()
        await until_none_is_leased(service.node)


async def test_a_lease_says_either_way_which_blocks_are_ordered_to_go(nodes) -> None:
    """Fails when a worker that starts after an operator's order cannot know of it."""
    async with nodes.inside() as service:
        shared, remote, prompt = nodes.shared_memory(service.record), nodes.grpc(service.record), make_prompt(1, 4)
        await publish(remote, prompt, range(4))
        for ordered in (False, True):
            if ordered:
                named = EvictSelector(block_hashes=(prompt.chain[1],))
                service.node.set_ttl(named, expires_unix_ms=CLOCK.unix_ms() + 3_600_000)
            for store in (shared, remote):
                lease = await store.lease_prefix(prompt.namespace, prompt.chain, first_block=2, deadline=deadline())
                await store.release(lease)
                assert [block_hash for block_hash, _ in lease.ends] == ([prompt.chain[1]] if ordered else [])
                assert all(3_000 < left_s <= 3_600 for _, left_s in lease.ends)


async def test_blocks_longer_than_a_chunk_arrive_whole(tmp_path: Path, nodes) -> None:
    node = await nodes.start(arena_mb=16)
    remote, prompt = nodes.grpc(node.record), make_prompt(1, 2)
    assert await publish(remote, prompt, range(2), LONG) == 2
    assert await read(remote, prompt) == [payload_of(make_header(prompt, i, LONG)) for i in range(2)]


async def test_views_stay_good_while_later_blocks_arrive(nodes) -> None:
    """Fails when blocks are gathered in one reused buffer: readers copy behind the stream."""
    node = await nodes.start(arena_mb=16)
    remote, prompt = nodes.grpc(node.record), make_prompt(1, 3)
    await publish(remote, prompt, range(3), LONG)
    lease = await remote.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
    views = [view async for view in remote.fetch_blocks(lease, deadline=deadline())]
    assert [payload_digest(view) for view in views] == [header.payload_xxh3 for header in lease.headers]


async def test_a_writer_killed_in_the_middle_of_filling_leaves_no_half_block_and_no_slot(nodes) -> None:
    async with nodes.inside(reservation_ttl_ms=4_000) as service:
        kit = str(Path(__file__).parents[2] / "unit" / "store")
        code = WRITER.format(kit=kit, record=service.record)
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        assert writer.stdout is not None
        assert await asyncio.wait_for(writer.stdout.readline(), 60) == b"half way\n"
        writer.kill()
        await writer.wait()
        prompt, remote = make_prompt(1, 3), nodes.grpc(service.record)
        assert service.node.stat().reserved_blocks == 2
        assert len(await read(remote, prompt)) == 1
        async with asyncio.timeout(60):
            while service.node.stat().reserved_blocks:  # noqa: ASYNC110 (a node has no event for this)
                await asyncio.sleep(0.05)
        assert service.node.stat().committed_blocks == 1
        service.node.check_integrity()
        assert await publish(remote, prompt, range(3)) == 2


async def test_bytes_that_change_in_the_arena_are_seen_by_readers_and_dropped_on_their_word(nodes) -> None:
    async with nodes.inside() as service:
        shared, remote, prompt = nodes.shared_memory(service.record), nodes.grpc(service.record), make_prompt(1, 3)
        await publish(shared, prompt, range(3))
        arena = shared._mapped(service.record.incarnation)
        lease = await remote.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
        arena.payload(lease.slots[1], 8)[:] = b"\xffcorrupt"
        for store in (shared, remote):
            own = await store.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
            digests = [payload_digest(view) async for view in store.fetch_blocks(own, deadline=deadline())]
            matches = [d == h.payload_xxh3 for d, h in zip(digests, own.headers, strict=True)]
            assert matches == [True, False, True]
            await store.release(own)
        await remote.release(lease, suspects=[1])
        assert len(await read(shared, prompt)) == 1
        assert await publish(remote, prompt, range(3)) == 2
        assert len(await read(shared, prompt)) == 3


async def test_wrong_bytes_and_wrong_lengths_are_refused_at_commit(nodes) -> None:
    async with nodes.inside() as service:
        shared, remote, prompt = nodes.shared_memory(service.record), nodes.grpc(service.record), make_prompt(1, 1)
        (reserved,) = await shared.reserve([make_header(prompt, 0)], deadline=deadline())
        assert isinstance(reserved, Reservation)
        with pytest.raises(BlockCorrupt, match="checksum"):
            await shared.commit(reserved, payload_xxh3=1, deadline=deadline())
        for cut in (100, 3_000):
            (reserved,) = await remote.reserve([make_header(prompt, 0)], deadline=deadline())
            assert isinstance(reserved, Reservation)
            buffer = memoryview(bytearray(cut))
            with pytest.raises(BlockCorrupt, match=r"shorter|longer"):
                await remote.commit(
                    replace(reserved, buffer=buffer), payload_xxh3=payload_digest(buffer), deadline=deadline()
                )
        assert service.node.stat().reserved_blocks == 0


async def test_a_lease_that_runs_out_ends_the_read_with_a_typed_error(nodes) -> None:
    async with nodes.inside(lease_ttl_ms=300) as service:
        prompt = make_prompt(1, 4)
        await publish(nodes.grpc(service.record), prompt, range(4))
        for store in (nodes.shared_memory(service.record), nodes.grpc(service.record)):
            lease = await store.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
            await asyncio.sleep(0.35)
            with pytest.raises(LeaseExpired):
                async for _ in store.fetch_blocks(lease, deadline=deadline()):
                    pass
            await store.release(lease)
        await until_none_is_leased(service.node)


async def test_a_reservation_that_ran_out_cannot_be_committed(nodes) -> None:
    async with nodes.inside(reservation_ttl_ms=100) as service:
        for store in (nodes.shared_memory(service.record), nodes.grpc(service.record)):
            (reserved,) = await store.reserve([make_header(make_prompt(1, 1), 0)], deadline=deadline())
            assert isinstance(reserved, Reservation)
            await asyncio.sleep(0.15)
            digest = payload_digest(reserved.buffer)
            with pytest.raises(LeaseExpired):
                await store.commit(reserved, payload_xxh3=digest, deadline=deadline())
            await store.abort(reserved)
        service.node.check_integrity()


async def test_a_store_full_of_leased_blocks_refuses_and_takes_again_after_release(nodes) -> None:
    async with nodes.inside() as service:
        remote, wide = nodes.grpc(service.record), replace(LAYOUT, num_layers=32)
        first, second = make_prompt(1, 20), make_prompt(2, 20)
        held = await publish(remote, first, range(20), wide)
        assert 0 < held < 20
        lease = await remote.lease_prefix(first.namespace, first.chain, first_block=0, deadline=deadline())
        room = await publish(remote, second, range(20), wide)
        outcomes = await remote.reserve([make_header(second, room, wide)], deadline=deadline())
        assert outcomes == (NotStored(second.chain[room]),)
        assert len(await read(remote, first)) == held
        await remote.release(lease)
        await until_none_is_leased(service.node)
        assert await publish(remote, second, range(room, 20), wide) > 0
        service.node.check_integrity()


async def test_two_writers_of_one_prompt_store_each_block_once(nodes) -> None:
    async with nodes.inside() as service:
        prompt, stores = make_prompt(1, 6), [nodes.shared_memory(service.record), nodes.grpc(service.record)]
        stored = await asyncio.gather(*(publish(stores[i % 2], prompt, range(6)) for i in range(8)))
        assert sum(stored) == 6
        assert service.node.stat().committed_blocks == 6
        assert await stores[0].reserve([make_header(prompt, 5)], deadline=deadline()) == (
            AlreadyStored(prompt.chain[5]),
        )


async def test_an_eviction_spares_what_is_being_read_and_says_so(nodes) -> None:
    async with nodes.inside() as service:
        remote, prompt = nodes.grpc(service.record), make_prompt(1, 4)
        await publish(remote, prompt, range(4))
        lease = await remote.lease_prefix(prompt.namespace, prompt.chain[:2], first_block=0, deadline=deadline())
        admin = admin_pb2_grpc.CacheAdminStub(nodes.channels.to(service.record.address))
        dry = (await admin.Evict(admin_pb2.EvictRequest(dry_run=True))).reports[0]
        assert (dry.blocks, dry.skipped_leased_blocks, dry.dry_run) == (2, 2, True)
        report = (await admin.Evict(admin_pb2.EvictRequest())).reports[0]
        assert (report.blocks, report.tokens, report.skipped_leased_blocks) == (2, 8, 2)
        assert [len(view) async for view in remote.fetch_blocks(lease, deadline=deadline())] == [2_048] * 2
        listed = await admin.ListBlocks(admin_pb2.ListBlocksRequest())
        assert (listed.total_blocks, [entry.leases for entry in listed.blocks]) == (2, [1, 1])
        await remote.release(lease)
        await until_none_is_leased(service.node)
        assert (await admin.Evict(admin_pb2.EvictRequest())).reports[0].blocks == 2
        stat = (await admin.Stat(admin_pb2.StatRequest())).holders[0]
        assert (stat.committed_blocks, stat.evicted_blocks, stat.holder) == (0, 4, "node:inside")


async def test_a_model_that_nobody_serves_is_refused_rather_than_meaning_everything(nodes) -> None:
    async with nodes.inside() as service:
        await publish(nodes.grpc(service.record), make_prompt(1, 2), range(2))
        admin = admin_pb2_grpc.CacheAdminStub(nodes.channels.to(service.record.address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.Evict(admin_pb2.EvictRequest(selector=admin_pb2.Selector(model="nobody's")))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert service.node.stat().committed_blocks == 2


async def test_a_reader_that_stops_early_ends_its_call_and_leaves_the_channel_usable(nodes) -> None:
    async with nodes.inside() as service:
        remote, prompt = nodes.grpc(service.record), make_prompt(1, 6)
        await publish(remote, prompt, range(6))
        lease = await remote.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
        async with aclosing(remote.fetch_blocks(lease, deadline=deadline())) as views:
            async for _ in views:
                break
        await remote.release(lease)
        assert len(await read(remote, prompt)) == 6


async def test_calls_that_break_a_bound_get_a_typed_error_and_the_channel_stays_usable(nodes) -> None:
    async with nodes.inside() as service:
        stub = block_store_pb2_grpc.BlockStoreStub(nodes.channels.to(service.record.address))
        bad = [
            block_store_pb2.LeaseRequest(namespace="ab" * 16, chain=b"x" * 16 * 8_193, hash_bytes=16),
            block_store_pb2.LeaseRequest(namespace="ab" * 16, chain=b"x" * 17, hash_bytes=16),
            block_store_pb2.LeaseRequest(namespace="AB" * 16, chain=b"x" * 16, hash_bytes=16),
            block_store_pb2.LeaseRequest(namespace="ab" * 16, chain=b"x" * 16, hash_bytes=0),
        ]
        for request in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Lease(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for headers, code in (([b"junk"], "DATA_LOSS"), ([b""] * 257, "INVALID_ARGUMENT")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Reserve(block_store_pb2.ReserveRequest(headers=headers))
            assert caught.value.code().name == code
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reserve(block_store_pb2.ReserveRequest(headers=[b"x" * (17 << 20)]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await publish(nodes.grpc(service.record), make_prompt(1, 1), [0]) == 1


async def test_a_node_that_is_not_there_is_a_typed_error_within_the_deadline(nodes) -> None:
    async with nodes.inside() as service:
        record = replace(service.record, address="127.0.0.1:1")
    for store in (nodes.shared_memory(record), nodes.grpc(record)):
        with pytest.raises(StoreUnavailable):
            await store.lease_prefix("ab" * 16, make_prompt(1, 1).chain, first_block=0, deadline=deadline())


async def test_health_says_whether_the_node_serves(nodes) -> None:
    async with nodes.inside() as service:
        stub = health_pb2_grpc.HealthStub(nodes.channels.to(service.record.address))
        for name in ("", "headrace.v1.BlockStore"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_more_calls_than_a_server_takes_are_refused_at_once_and_not_queued(nodes, kit) -> None:
    server = build_server(rpcs_max=1)
    serve_blocks(server, kit.node)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    record = StoreNodeRecord("n1", kit.node.incarnation, "h", f"127.0.0.1:{port}", "", 0)
    remote, prompt = nodes.grpc(record), make_prompt(1, 1)
    (reserved,) = await remote.reserve([make_header(prompt, 0)], deadline=deadline())

    async def stalled() -> AsyncIterator[bytes]:
        yield block_store_pb2.FillStart(reservation_id=reserved.reservation_id).SerializeToString()
        yield b"first bytes"
        await asyncio.sleep(60)

    fill = asyncio.ensure_future(nodes.channels.to(record.address).stream_unary(FILL)(stalled(), timeout=30))
    async with asyncio.timeout(60):
        while kit.node.reserved_buffer(reserved.reservation_id)[:11] != b"first bytes":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(StoreUnavailable, match="RESOURCE_EXHAUSTED"):
        await remote.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
    fill.cancel()
    await asyncio.gather(fill, return_exceptions=True)
    async with asyncio.timeout(60):
        while kit.node.stat().reserved_blocks:  # noqa: ASYNC110 (the far side of a cancelled call has no event here)
            await asyncio.sleep(0.02)
    assert await publish(remote, prompt, [0]) == 1
    await server.stop(None)


@pytest.mark.parametrize("method", [FETCH, FILL])
async def test_junk_on_a_raw_method_is_a_typed_error(nodes, method: str) -> None:
    async with nodes.inside() as service:
        channel = nodes.channels.to(service.record.address)

        async def junk() -> AsyncIterator[bytes]:
            yield b"\xff\xff\xff"

        fetch, fill = channel.unary_stream(FETCH), channel.stream_unary(FILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (fetch(b"\xff\xff\xff").read() if method == FETCH else fill(junk()))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_large_prefix_arrives_over_grpc_at_the_cost_of_copying_it(nodes) -> None:
    """69 MB took 60 ms of two shared cores; twenty times that means that tiny messages crept in."""
    node = await nodes.start("fast", arena_mb=128)
    layout = replace(LAYOUT, num_layers=720)  # 47 blocks of 1.4 MiB: 3,000 tokens of the default model
    remote, prompt = nodes.grpc(node.record), make_prompt(5, 47)
    assert await publish(nodes.shared_memory(node.record), prompt, range(47), layout) == 47
    best_s = float("inf")
    for _ in range(4):
        lease = await remote.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
        began_s = time.process_time()
        async for view in remote.fetch_blocks(lease, deadline=deadline()):
            assert len(view) == layout.block_bytes
        best_s = min(best_s, time.process_time() - began_s)
        await remote.release(lease)
    assert layout.block_bytes * 47 > 60e6
    assert best_s < 1.4


async def test_small_blocks_travel_together_and_long_ones_in_pieces(nodes) -> None:
    """Fails when every small block costs a message of its own, or a message outgrows its bound."""
    node = await nodes.start("sizes", arena_mb=64)
    channel, sizes = nodes.channels.to(node.record.address), {}
    for seed, (num_layers, num_blocks) in enumerate([(1, 40), (720, 3), (1_500, 2)]):
        layout = replace(LAYOUT, num_layers=num_layers)
        remote, prompt = nodes.grpc(node.record), make_prompt(50 + seed, num_blocks)
        assert await publish(nodes.shared_memory(node.record), prompt, range(num_blocks), layout) == num_blocks
        lease = await remote.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
        request = block_store_pb2.FetchRequest(lease_id=lease.lease_id).SerializeToString()
        messages = [len(message) async for message in channel.unary_stream(FETCH)(request)]
        views = [bytes(view) async for view in remote.fetch_blocks(lease, deadline=deadline())]
        await remote.release(lease)
        assert [payload_digest(view) for view in views] == [header.payload_xxh3 for header in lease.headers]
        assert sum(messages) == num_blocks * layout.block_bytes
        sizes[layout.block_bytes] = messages
    small, middle, long = sizes.items()
    assert len(small[1]) == 1
    assert middle[1] == [middle[0]] * 3
    assert long[1] == [FETCH_CHUNK_BYTES, long[0] - FETCH_CHUNK_BYTES] * 2


@pytest.mark.parametrize(
    ("sent", "fault"), [([], BlockMissing), ([b"x" * 100], BlockMissing), ([b"x" * 3_000], StoreUnavailable)]
)
async def test_a_node_that_sends_less_or_more_than_a_block_has_is_found_out(nodes, sent, fault) -> None:
    async def fetch(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for chunk in sent:
            yield chunk

    server = build_server()
    handlers = {"Fetch": grpc.unary_stream_rpc_method_handler(fetch)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("headrace.v1.BlockStore", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    remote = nodes.grpc(StoreNodeRecord("n1", 1, "h", f"127.0.0.1:{port}", "", 0))
    header = make_header(make_prompt(1, 1), 0)
    lease = Lease("l-1", 1, (header,), (0,), 1_000)
    with pytest.raises(fault):
        await anext(remote.fetch_blocks(lease, deadline=deadline()))
    await server.stop(None)


@pytest.mark.parametrize("near", [True, False], ids=["shared memory", "gRPC"])
async def test_a_release_costs_its_reader_no_round_trip_and_arrives(nodes, near: bool) -> None:
    """Fails when a reader waits for the answer to a release, or the lease is left to its expiry."""
    async with nodes.inside() as service:
        prompt = make_prompt(1, 4)
        await publish(nodes.grpc(service.record), prompt, range(4))
        store = nodes.shared_memory(service.record) if near else nodes.grpc(service.record)
        lease = await store.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
        assert service.node.stat().leased_blocks == 4
        await store.release(lease)
        assert service.node.stat().leased_blocks == 4  # the node, on this loop, has not had its turn yet
        await until_none_is_leased(service.node)
        assert service.node.counters.expired_leases == 0


async def test_a_release_that_never_arrived_is_sent_again_with_the_lost_claims(nodes) -> None:
    """Fails when a release that failed on its way is forgotten: the blocks stay leased until LEASE_TTL_MS."""
    async with nodes.inside() as service:
        prompt = make_prompt(1, 4)
        remote = nodes.grpc(service.record)
        await publish(remote, prompt, range(4))
        lease = await remote.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
        await remote.release(lease)
        for telling in list(remote._calls._telling):
            telling.cancel()
        await remote.end_lost_claims()
        assert service.node.stat().leased_blocks == 0
        assert service.node.counters.expired_leases == 0
