"""Draining a node whose blocks others take over real gRPC: what moves, in which order, and what goes wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from silent_server import silent_server
from store_calls_kit import CLOCK, deadline, publish, read
from store_kit import LAYOUT, fill, make_branch, make_header, make_prompt, payload_of

from headrace.blocks.claims import SlotReserved
from headrace.config import StoreSettings
from headrace.core.block import HashedPrompt, payload_digest
from headrace.core.errors import StoreUnavailable
from headrace.core.generation import EvictSelector
from headrace.core.ports import NotStored
from headrace.core.retention import KEEP, NO_END_UNIX_MS, Retention
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.drain_node import MovingBlocks, drain_node
from headrace.store.drain_peer import DrainPeer
from headrace.store.service import StoreNodeService
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

SMALL_MB = 1  # about 250 blocks of LAYOUT


@dataclass
class Node:
    """One store node in this process and the ways to it."""

    service: StoreNodeService
    store: GrpcStore
    admin: Any

    @property
    def id(self) -> str:
        return self.service.record.node_id

    @property
    def peer(self) -> admin_pb2.DrainPeer:
        return admin_pb2.DrainPeer(node_id=self.id, address=self.service.record.address)

    def keep(self, prompt: HashedPrompt, retention: Retention = KEEP) -> None:
        """Store a whole prompt in place."""
        headers = [make_header(prompt, i) for i in range(len(prompt.chain))]
        for outcome in self.service.node.reserve(headers, retention=retention):
            if isinstance(outcome, SlotReserved):
                fill(outcome)
                self.service.node.commit(outcome.reservation_id, payload_digest(outcome.buffer))

    def held(self, prompt: HashedPrompt) -> int:
        return self.service.node.lookup(prompt.namespace, prompt.chain)

    def drain(self, *peers: "Node", **order: Any) -> Any:
        """The stream of progress; reading it is left to the test."""
        return self.admin.Drain(admin_pb2.DrainRequest(peers=[peer.peer for peer in peers], who="ops", **order))

    async def drained(self, *peers: "Node", **order: Any) -> admin_pb2.DrainNodeProgress:
        """What the drain says in the end."""
        async with asyncio.timeout(60):
            async for progress in self.drain(*peers, **order):
                last = progress
        assert last.done
        return last


@dataclass
class Fleet:
    """Nodes of one deployment."""

    directory: Path
    membership: MemoryMembership
    channels: Channels
    stack: AsyncExitStack

    async def start(self, node_id: str, *, arena_mb: int = SMALL_MB, disk_gb: float = 0.0) -> Node:
        settings = StoreSettings(
            node_id=node_id,
            arena_mb=arena_mb,
            arena_dir=str(self.directory),
            disk_gb=disk_gb,
            disk_dir=str(self.directory / "disk"),
        )
        service = StoreNodeService(
            settings, index=MemoryIndex(self.membership), membership=self.membership, clock=CLOCK
        )
        record = await service.start()
        self.stack.push_async_callback(self.end, service)
        stub_of: Any = admin_pb2_grpc.NodeAdminStub
        return Node(service, GrpcStore(record, self.channels, CLOCK), stub_of(self.channels.to(record.address)))

    async def end(self, service: StoreNodeService) -> None:
        """A node must balance, with nothing of the drain left in it once the test's own readers have let go."""
        async with asyncio.timeout(60):
            while service.node.stat().leased_blocks:  # noqa: ASYNC110 (a release is told, not waited for)
                await asyncio.sleep(0.01)
        reserved_blocks = service.node.stat().reserved_blocks
        service.node.check_integrity()
        await service.stop(remove_arena=True)
        assert reserved_blocks == 0


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        channels = Channels()
        stack.push_async_callback(channels.close)
        yield Fleet(tmp_path, MemoryMembership(CLOCK), channels, stack)


async def test_a_drained_nodes_blocks_are_read_from_its_peer(fleet):
    """Fails when a block is lost, changed or sent although the peer had it, or the account is not what was done."""
    old, new = await fleet.start("old"), await fleet.start("new")
    prompts = [make_branch(1, tail, head_blocks=3, tail_blocks=9) for tail in range(2, 6)]
    for prompt in prompts:
        old.keep(prompt)
    new.keep(make_branch(1, 2, head_blocks=3, tail_blocks=1))
    before = old.service.node.stat()
    last = await old.drained(new)
    assert (last.state, last.error) == ("drained", "")
    assert (last.total_blocks, last.moved_blocks, last.present_blocks, last.refused_blocks) == (39, 35, 4, 0)
    assert (last.moved_bytes, dict(last.moved_to)) == (35 * LAYOUT.block_bytes, {"new": 35})
    for prompt in prompts:
        assert await read(new.store, prompt) == await read(old.store, prompt)
        assert new.held(prompt) == len(prompt.chain)
    assert (before.lookups_tokens, before.hits_tokens) == (0, 0), "moving counted as use"


async def test_a_draining_node_takes_nothing_new_and_still_answers(fleet):
    """Fails when a block is stored after the order, the members do not hear of it, or reads are refused."""
    node = await fleet.start("old")
    kept, fresh = make_prompt(1, 4), make_prompt(2, 4)
    node.keep(kept)
    last = await node.drained(without_moving=True)
    (record,) = await fleet.membership.store_nodes()
    assert record.draining
    assert (last.state, last.total_blocks) == ("draining", 0)
    outcomes = await node.store.reserve([make_header(fresh, i) for i in range(4)], deadline=deadline())
    assert {type(outcome) for outcome in outcomes} == {NotStored}
    assert await publish(node.store, kept, range(4)) == 0
    assert len(await read(node.store, kept)) == 4
    last = await node.drained(undo=True)
    (record,) = await fleet.membership.store_nodes()
    assert (last.state, record.draining) == ("serving", False)
    assert await publish(node.store, fresh, range(4)) == 4


async def test_what_was_used_last_goes_first_and_parents_before_children(fleet):
    """Fails when a drain that is cut short would have moved cold blocks."""
    old, new = await fleet.start("old"), await fleet.start("new")
    prompts = [make_prompt(number, 4) for number in range(4)]
    for prompt in prompts:
        old.keep(prompt)
    for number in (2, 0, 3):
        await read(old.store, prompts[number])
    await old.drained(new)
    # Blocks are listed in the order in which they came, by position: roots first.
    came = [block.header.block_hash for block in new.service.node.residents()]
    assert came[:4] == [prompts[number].chain[0] for number in (3, 0, 2, 1)]


async def test_blocks_on_disk_move_without_coming_into_the_arena(fleet):
    """Fails when what lies on disk alone is left behind, or a drain pushes out of the arena what readers want."""
    old = await fleet.start("old", disk_gb=0.05)
    new = await fleet.start("new", arena_mb=4)
    prompts = [make_prompt(number, 60) for number in range(8)]
    for prompt in prompts:
        old.keep(prompt)
    assert len(old.service.node.disk) > 200
    last = await old.drained(new)
    assert (last.state, last.moved_blocks, last.total_blocks) == ("drained", 480, 480)
    assert old.service.node.disk.counters.promoted_blocks == 0
    for prompt in prompts:
        assert len(await read(new.store, prompt)) == 60


async def test_a_peer_that_does_not_answer_is_set_aside(fleet):
    """Fails when one dead peer ends the drain, or what is on nobody counts as moved."""
    old, new = await fleet.start("old"), await fleet.start("new")
    prompt = make_prompt(1, 10)
    old.keep(prompt)
    dead = admin_pb2.DrainPeer(node_id="dead", address="127.0.0.1:9")
    async with asyncio.timeout(60):
        steps = [step async for step in old.admin.Drain(admin_pb2.DrainRequest(peers=[dead, new.peer]))]
    assert (steps[-1].state, steps[-1].moved_blocks, steps[-1].error) == ("drained", 10, "")
    assert new.held(prompt) == 10
    async with asyncio.timeout(60):
        steps = [step async for step in old.admin.Drain(admin_pb2.DrainRequest(peers=[dead]))]
    assert (steps[-1].state, steps[-1].moved_blocks) == ("draining", 0)
    assert "no peer is left" in steps[-1].error


class DiesLater:
    """A node's write side that answers for a while and then does not: what a killed process looks like from here."""

    def __init__(self, store: GrpcStore, commits: int) -> None:
        self._store = store
        self._commits_left = commits

    async def reserve(self, headers, *, deadline, retention):
        return await self._store.reserve(headers, deadline=deadline, retention=retention)

    async def commit(self, reservation, *, payload_xxh3, deadline):
        if self._commits_left == 0:
            raise StoreUnavailable("dying", "test")
        self._commits_left -= 1
        await self._store.commit(reservation, payload_xxh3=payload_xxh3, deadline=deadline)

    async def abort(self, reservation):
        await self._store.abort(reservation)


async def test_what_went_to_a_peer_that_died_goes_to_another(fleet):
    """Fails when blocks that only a dead peer has count as moved, and are not moved again."""
    old, dying, new = await fleet.start("old"), await fleet.start("dying"), await fleet.start("new")
    prompts = [make_prompt(number, 6) for number in range(6)]
    for prompt in prompts:
        old.keep(prompt)
    old.service.node.draining = True
    moving = MovingBlocks(
        old.service.node,
        [
            DrainPeer("dying", DiesLater(dying.store, 7), CLOCK, carry=_nothing_ordered),
            DrainPeer("new", new.store, CLOCK, carry=_nothing_ordered),
        ],
    )
    await drain_node(moving)
    count = moving.count()
    assert (count.moved_blocks, count.refused_blocks, count.total_blocks) == (36, 0, 36)
    assert sum(new.held(prompt) for prompt in prompts) == 36
    assert [peer.node_id for peer in moving.peers] == ["new"]


async def _nothing_ordered(block) -> str:
    raise AssertionError("nothing was ordered about any block")


async def test_two_peers_share_what_stands_on_one_root(fleet):
    """Fails when all chains of one system prompt end up on one peer."""
    old, one, two = await fleet.start("old"), await fleet.start("one"), await fleet.start("two")
    prompts = [make_branch(1, tail, head_blocks=2, tail_blocks=8) for tail in range(2, 14)]
    for prompt in prompts:
        old.keep(prompt)
    last = await old.drained(one, two)
    assert (last.moved_blocks, last.refused_blocks) == (2 + 12 * 8, 0)
    shares = [sum(node.held(prompt) == 10 for prompt in prompts) for node in (one, two)]
    assert sum(shares) == 12
    assert min(shares) >= 4


async def test_blocks_that_no_peer_has_room_for_are_counted(fleet):
    """Fails when a refusal is taken for a failure, is tried for ever, or goes unsaid."""
    old, small, small_too = await fleet.start("old", arena_mb=2), await fleet.start("s1"), await fleet.start("s2")
    prompt = make_prompt(1, 240)  # longer than one chain may be on the others
    old.keep(prompt)
    last = await old.drained(small, small_too)
    moved = max(small.held(prompt), small_too.held(prompt))
    assert 0 < moved < 240
    assert (last.state, last.moved_blocks, last.refused_blocks) == ("drained", moved, 240 - moved)


async def test_a_block_whose_bytes_are_broken_is_dropped_and_not_handed_on(fleet):
    """Fails when broken bytes reach a peer, or stop the drain."""
    old, new = await fleet.start("old"), await fleet.start("new")
    broken, whole = make_prompt(1, 6), make_prompt(2, 6)
    old.keep(broken)
    old.keep(whole)
    await asyncio.to_thread(_damage, Path(old.service.record.arena_path), payload_of(make_header(broken, 2)))
    last = await old.drained(new)
    assert (new.held(broken), new.held(whole)) == (2, 6)
    assert (last.state, last.moved_blocks, last.total_blocks) == ("drained", 8, 8)
    assert old.held(broken) == 2


def _damage(arena: Path, payload: bytes) -> None:
    with arena.open("r+b") as file:
        file.seek(file.read().index(payload))
        file.write(b"\xff")


@pytest.mark.alone
async def test_closing_the_stream_stops_the_moving_and_leaves_the_node_draining(fleet):
    """Fails when a drain goes on without its caller, keeps others from draining, or ends the order with it."""
    old, new = await fleet.start("old"), await fleet.start("new")
    prompt = make_prompt(1, 10)
    old.keep(prompt)
    async with silent_node() as silent:
        call = old.admin.Drain(admin_pb2.DrainRequest(peers=[silent]))
        first = await asyncio.wait_for(call.read(), 60)
        assert (first.done, first.state) == (False, "draining")
        with pytest.raises(grpc.aio.AioRpcError) as second:
            await old.drained(new)
        assert "drained already" in second.value.details()
        call.cancel()
        async with asyncio.timeout(4.5):  # sooner than a block's own time limit
            while [task for task in asyncio.all_tasks() if task.get_name() == "drain old"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert old.service.node.draining
    assert new.held(prompt) == 0
    assert (await old.drained(new)).moved_blocks == 10


async def test_a_node_told_to_serve_again_stops_moving(fleet):
    """Fails when `undo` waits for the drain, or the drain goes on after it."""
    old = await fleet.start("old")
    old.keep(make_prompt(1, 10))
    async with silent_node() as silent:
        call = old.admin.Drain(admin_pb2.DrainRequest(peers=[silent]))
        await asyncio.wait_for(call.read(), 60)
        assert (await old.drained(undo=True)).state == "serving"
        async with asyncio.timeout(60):
            while (step := await call.read()) is not grpc.aio.EOF:
                last = step
    assert (last.done, last.state) == (True, "serving")
    assert "serve again" in last.error


@asynccontextmanager
async def silent_node() -> AsyncIterator[admin_pb2.DrainPeer]:
    async with silent_server() as port:
        yield admin_pb2.DrainPeer(node_id="silent", address=f"127.0.0.1:{port}")


async def test_a_drain_without_a_peer_is_refused_and_changes_nothing(fleet):
    """Fails when a node that has nobody to move to refuses new blocks all the same."""
    node = await fleet.start("old")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await node.drained()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not node.service.node.draining


async def test_a_blocks_time_to_live_ends_on_the_peer_when_it_would_have_here(fleet):
    """Fails when a move makes a tenant's blocks outlive what was asked for, or has them written to a disk."""
    old, new = await fleet.start("old"), await fleet.start("new", disk_gb=0.05)
    bounded, kept = make_prompt(1, 6), make_prompt(2, 6)
    old.keep(bounded, Retention(ttl_s=600, on_disk=False))
    old.keep(kept)
    assert (await old.drained(new)).moved_blocks == 12
    before = {block.key: block for block in old.service.node.residents()}
    for block in new.service.node.residents():
        here = before[block.key]
        assert abs(block.expires_unix_ms - here.expires_unix_ms) < 60_000
        assert block.not_on_disk == here.not_on_disk
        assert bool(block.expires_unix_ms) == (block.header.block_hash in bounded.chain)


async def test_pins_and_orders_hold_on_the_peer_and_pinned_prefixes_go_first(fleet):
    """Fails when a pin is lost by draining the node that kept it, or an ordered end is forgotten."""
    old, new = await fleet.start("old"), await fleet.start("new")
    pinned, ordered, other = make_prompt(1, 6), make_prompt(2, 6), make_prompt(3, 6)
    for prompt in (pinned, ordered, other):
        old.keep(prompt)
    until_unix_ms, over_unix_ms = CLOCK.unix_ms() + 3_600_000, CLOCK.unix_ms() + 7_200_000
    old.service.node.pin(named(pinned.chain[3]), until_unix_ms=until_unix_ms)
    old.service.node.set_ttl(named(ordered.chain[1]), expires_unix_ms=over_unix_ms)
    last = await old.drained(new)
    assert (last.moved_blocks, last.error) == (18, "")
    there = {block.header.block_hash: block for block in new.service.node.residents()}
    assert abs(there[pinned.chain[3]].pinned_until_unix_ms - until_unix_ms) < 60_000
    assert abs(there[ordered.chain[1]].ordered_unix_ms - over_unix_ms) < 60_000
    assert [there[block_hash].pin_refs for block_hash in pinned.chain] == [1, 1, 1, 1, 0, 0]
    assert next(iter(new.service.node.residents())).header.block_hash == pinned.chain[0]


async def test_what_a_peer_was_told_itself_stands_where_it_keeps_longer_or_ends_sooner(fleet):
    """Fails when a drain shortens a pin that an operator gave the peer, or puts off the end that he ordered there."""
    old, new = await fleet.start("old"), await fleet.start("new")
    now, hour = CLOCK.unix_ms(), 3_600_000
    prompts = [make_prompt(token, 3) for token in range(1, 7)]
    shorter, longer, endless, sooner, later, taken_over = (prompt.chain[-1] for prompt in prompts)
    for node in (old, new):
        for prompt in prompts:
            node.keep(prompt)
    here = {shorter: now + 2 * hour, longer: now + hour, endless: now + hour, taken_over: None}
    for block_hash, until in here.items():
        old.service.node.pin(named(block_hash), until_unix_ms=until)
    for block_hash, until in {shorter: now + hour, longer: now + 3 * hour, endless: None}.items():
        new.service.node.pin(named(block_hash), until_unix_ms=until)
    for node, ends in ((old, (2, 2)), (new, (1, 3))):
        for block_hash, hours in zip((sooner, later), ends, strict=True):
            node.service.node.set_ttl(named(block_hash), expires_unix_ms=now + hours * hour)
    last = await old.drained(new)
    assert (last.present_blocks, last.error) == (18, "")
    there = {block.header.block_hash: block for block in new.service.node.residents()}
    pins = [there[block_hash].pinned_until_unix_ms for block_hash in (shorter, longer, endless, taken_over)]
    assert pins[1:] == [now + 3 * hour, NO_END_UNIX_MS, NO_END_UNIX_MS]
    assert abs(pins[0] - (now + 2 * hour)) < 60_000
    ordered = [there[block_hash].ordered_unix_ms for block_hash in (sooner, later)]
    assert ordered[0] == now + hour
    assert abs(ordered[1] - (now + 2 * hour)) < 60_000


async def test_a_pin_that_the_peer_refuses_is_said(fleet):
    """Fails when an operator learns only later that a prefix is not kept any more."""
    old, new = await fleet.start("old"), await fleet.start("new")
    taken, pinned = make_prompt(1, 110), make_prompt(2, 60)
    new.keep(taken)
    new.service.node.pin(named(taken.chain[-1]), until_unix_ms=None)
    old.keep(pinned)
    old.service.node.pin(named(pinned.chain[-1]), until_unix_ms=None)
    last = await old.drained(new)
    assert (last.state, last.moved_blocks) == ("drained", 60)
    assert "1 pins or times to live do not hold where the blocks went" in last.error
    assert "of the arena" in last.error


def named(block_hash: bytes) -> EvictSelector:
    return EvictSelector(block_hashes=(block_hash,))
