"""KV events over real sockets, of a real store node: subscribe, miss, replay, restart, followers that misbehave."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from kv_events_kit import END, Follower
from store_kit import fill, make_header, make_prompt

from headrace.blocks.claims import SlotReserved
from headrace.config import StoreSettings
from headrace.core.block import BlockHash, HashedPrompt, payload_digest
from headrace.core.clock import SystemClock
from headrace.core.errors import ConfigInvalid
from headrace.core.generation import EvictSelector
from headrace.core.index_limits import KV_EVENTS_SUBSCRIBER_BATCHES_MAX
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.kv_event_format import EventFormat
from headrace.store.kv_event_log import EventBatch, KvEventLog
from headrace.store.publish_kv_events import KvEventSockets, publish_kv_events
from headrace.store.service import StoreNodeService

CLOCK = SystemClock()
ENDPOINTS = StoreSettings(
    node_id="n1",
    arena_mb=1,
    kv_events_endpoint="tcp://127.0.0.1:*",
    kv_events_replay_endpoint="tcp://127.0.0.1:*",
    kv_events_hashes="bytes",
)


@asynccontextmanager
async def serving(settings: StoreSettings, arena_dir: Path) -> AsyncIterator[StoreNodeService]:
    membership = MemoryMembership(CLOCK)
    service = StoreNodeService(
        replace(settings, arena_dir=str(arena_dir)), index=MemoryIndex(membership), membership=membership, clock=CLOCK
    )
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def store(service: StoreNodeService, prompt: HashedPrompt, num_blocks: int) -> None:
    for outcome in service.node.reserve([make_header(prompt, i) for i in range(num_blocks)]):
        if isinstance(outcome, SlotReserved):
            fill(outcome)
            service.node.commit(outcome.reservation_id, payload_digest(outcome.buffer))


class Router:
    """A router's side of the two sockets."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.context = context
        self.follower = Follower()
        self.topics: set[bytes] = set()

    async def subscribe(self, endpoint: str, send: Callable[[], None]) -> None:
        """Connect, and wait until messages arrive: a subscriber hears nothing before its subscription does."""
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.live.connect(endpoint)
        async with asyncio.timeout(60):
            while not await self.live.poll(20):
                send()
                await asyncio.sleep(0.01)

    async def receive(self) -> tuple[int, bytes]:
        async with asyncio.timeout(60):
            topic, sequence, payload = await self.live.recv_multipart()
        self.topics.add(topic)
        return int.from_bytes(sequence, "big"), payload

    async def replay(self, endpoint: str, start: int) -> list[tuple[int, bytes]]:
        """Ask, and read up to the end marker."""
        asking = self.context.socket(zmq.DEALER)
        asking.connect(endpoint)
        await asking.send_multipart([b"", start.to_bytes(8, "big")])
        replies = []
        async with asyncio.timeout(60):
            while True:
                empty, sequence, payload = await asking.recv_multipart()
                assert empty == b""
                if sequence == END:
                    assert payload == b""
                    break
                replies.append((int.from_bytes(sequence, "big"), payload))
        asking.close(0)
        return replies

    async def catch_up(self, service: StoreNodeService) -> None:
        for reply in await self.replay(service.kv_events.replay_endpoint, self.follower.last + 1):
            self.follower.apply(*reply)

    async def follow_until(self, service: StoreNodeService) -> None:
        """Take live messages, replaying gaps, until the follower holds what the node holds."""
        while set(self.follower.held) != {block_hash for _, block_hash in service.node.inventory()}:
            sequence, payload = await self.receive()
            if self.follower.misses_before(sequence):
                await self.catch_up(service)
            self.follower.apply(sequence, payload)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    context = zmq.asyncio.Context()
    try:
        yield Router(context)
    finally:
        context.destroy(linger=0)


def nudge(service: StoreNodeService, token: int = 900) -> Callable[[], None]:
    """Something to say: a block comes and goes."""

    def store_and_evict() -> None:
        store(service, make_prompt(token, 1), 1)
        service.node.evict(EvictSelector(), dry_run=False)

    return store_and_evict


async def test_a_router_follows_blocks_as_they_come_and_go(tmp_path: Path, router: Router):
    """Fails when an event is missing, late or in the wrong order: the router's view would differ from the node's."""
    async with serving(ENDPOINTS, tmp_path) as service:
        await router.subscribe(service.kv_events.endpoint, nudge(service))
        prompt = make_prompt(1, 4)
        store(service, prompt, 4)
        await router.follow_until(service)
        assert list(router.follower.held) == list(prompt.chain)
        assert router.follower.held[prompt.chain[2]] == (prompt.chain[1], prompt.block_token_ids(2))
        service.node.evict(EvictSelector(), dry_run=False)
        await router.follow_until(service)
        assert router.follower.held == {}
        assert router.topics == {b"kv@n1"}


async def test_a_router_that_comes_late_asks_from_zero_and_holds_everything(tmp_path: Path, router: Router):
    async with serving(ENDPOINTS, tmp_path) as service:
        prompt = make_prompt(1, 5)
        store(service, prompt, 5)
        await router.catch_up(service)
        assert list(router.follower.held) == list(prompt.chain)


async def test_a_gap_is_seen_and_recovered(tmp_path: Path, router: Router):
    """Fails when numbers do not tell of lost messages, or a replay does not bring them back."""
    async with serving(ENDPOINTS, tmp_path) as service:
        await router.subscribe(service.kv_events.endpoint, nudge(service))
        await router.catch_up(service)
        prompts = [make_prompt(token, 2) for token in (1, 2, 3)]
        seen = sequence = router.follower.last
        for prompt in prompts:  # a batch of its own for each, and all but the last are lost
            store(service, prompt, 2)
            before = sequence
            while sequence <= before:
                sequence, payload = await router.receive()
        assert sequence > seen + 1
        assert router.follower.misses_before(sequence)
        await router.catch_up(service)
        router.follower.apply(sequence, payload)
        await router.follow_until(service)
        assert set(router.follower.held) == {block for prompt in prompts for block in prompt.chain}


async def test_a_restarted_node_is_followed_without_being_told(tmp_path: Path, router: Router):
    """The blocks found again are there, those lost are not, and the numbers show that something was missed."""
    async with serving(ENDPOINTS, tmp_path) as service:
        prompt = make_prompt(1, 3)
        store(service, prompt, 3)
        await router.catch_up(service)
        before = router.follower.last
        service.node.evict(EvictSelector(), dry_run=False)
        store(service, prompt, 2)  # what the router does not hear of
    async with serving(ENDPOINTS, tmp_path) as service:
        await router.subscribe(service.kv_events.endpoint, nudge(service))
        sequence, _ = await router.receive()
        assert sequence > before + 1
        store(service, prompt, 2)
        await router.catch_up(service)
        assert list(router.follower.held) == list(prompt.chain[:2])
        assert router.follower.last >= sequence


async def test_the_blocks_of_the_last_run_are_in_the_first_replay(tmp_path: Path, router: Router):
    async with serving(ENDPOINTS, tmp_path) as service:
        prompt = make_prompt(1, 3)
        store(service, prompt, 3)
    async with serving(ENDPOINTS, tmp_path) as service:
        await router.catch_up(service)
        assert list(router.follower.held) == list(prompt.chain)


async def test_junk_on_the_replay_socket_is_passed_over(tmp_path: Path, router: Router):
    async with serving(ENDPOINTS, tmp_path) as service:
        store(service, make_prompt(1, 1), 1)
        junk = router.context.socket(zmq.DEALER)
        junk.connect(service.kv_events.replay_endpoint)
        for frames in ([b"", b"short"], [b"x"], [b"", b"", b"", b""]):
            await junk.send_multipart(frames)
        await router.catch_up(service)
        assert len(router.follower.held) == 1


async def test_a_subscriber_that_never_reads_costs_messages_and_no_time(router: Router):
    """Fails when a full queue makes the publisher wait: the node's event loop would stand still."""
    sockets = KvEventSockets(ENDPOINTS, node_id="n1")
    try:
        deaf = router.context.socket(zmq.SUB)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4_096)
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        deaf.connect(sockets.endpoint)
        payload = bytes(16_384)
        async with asyncio.timeout(60):
            while not await deaf.poll(20):
                await sockets.send(EventBatch(0, payload))
        num_batches = KV_EVENTS_SUBSCRIBER_BATCHES_MAX + 1_024
        async with asyncio.timeout(60):
            for sequence in range(1, num_batches + 1):
                await sockets.send(EventBatch(sequence, payload))
        received = []
        while await deaf.poll(200):
            received.append(int.from_bytes((await deaf.recv_multipart())[1], "big"))
        assert len(received) < num_batches, "the queue is not bounded"
    finally:
        sockets.close()


async def test_an_asker_that_does_not_read_delays_no_live_events(router: Router):
    """A replay that nobody takes waits by itself; live events go on, and its asker's leaving frees the next in line."""
    log, sockets = KvEventLog(EventFormat(), clock=CLOCK), KvEventSockets(ENDPOINTS, node_id="n1")
    header = make_header(make_prompt(1, 1), 0)
    for number in range(2_000):  # 10 MB: more than what the system's buffers take in
        block_hash = BlockHash(number.to_bytes(16, "big"))
        log.added(replace(header, block_hash=block_hash, token_ids=tuple(range(100_000, 101_024))))
    log.begin(1)
    publishing = asyncio.create_task(publish_kv_events(log, sockets, clock=CLOCK))
    try:
        await router.subscribe(sockets.endpoint, lambda: log.added(header))
        mute = router.context.socket(zmq.DEALER)
        mute.setsockopt(zmq.RCVHWM, 1)
        mute.setsockopt(zmq.RCVBUF, 4_096)
        mute.connect(sockets.replay_endpoint)
        await mute.send_multipart([b"", bytes(8)])
        assert await mute.poll(60_000), "the replay has begun"
        waiting = asyncio.create_task(router.replay(sockets.replay_endpoint, 0))
        await asyncio.sleep(0.3)
        while await router.live.poll(0):
            await router.receive()
        log.added(header)
        await router.receive()
        assert not waiting.done()
        mute.close(0)
        assert sum(len(payload) for _, payload in await waiting) > 9_000_000
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        sockets.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "tcp://203.0.113.1:5557"])
async def test_an_endpoint_that_cannot_be_used_is_refused_by_name(tmp_path: Path, endpoint: str):
    """Fails when a node starts without the events that it was told to send."""
    with pytest.raises(ConfigInvalid, match="kv_events_endpoint"):
        async with serving(replace(ENDPOINTS, kv_events_endpoint=endpoint), tmp_path):
            pass
    with pytest.raises(ConfigInvalid, match="kv_events_replay_endpoint"):
        async with serving(replace(ENDPOINTS, kv_events_replay_endpoint=endpoint), tmp_path):
            pass


async def test_a_node_can_connect_to_a_router_that_listens(tmp_path: Path, router: Router):
    """llm-d's central mode: the router binds, its nodes connect."""
    listening = router.context.socket(zmq.SUB)
    listening.setsockopt(zmq.SUBSCRIBE, b"kv@n1@some/model")
    port = listening.bind_to_random_port("tcp://127.0.0.1")
    settings = replace(ENDPOINTS, kv_events_endpoint=f">tcp://127.0.0.1:{port}", kv_events_topic="kv@n1@some/model")
    async with serving(settings, tmp_path) as service:
        async with asyncio.timeout(60):
            while not await listening.poll(20):
                nudge(service)()
                await asyncio.sleep(0.01)
        topic, *_ = await listening.recv_multipart()
        assert topic == b"kv@n1@some/model"


async def test_stopping_frees_the_ports(tmp_path: Path):
    async with serving(ENDPOINTS, tmp_path) as service:
        taken = replace(
            ENDPOINTS,
            kv_events_endpoint=service.kv_events.endpoint,
            kv_events_replay_endpoint=service.kv_events.replay_endpoint,
        )
    async with serving(taken, tmp_path) as service:
        assert service.kv_events.endpoint == taken.kv_events_endpoint
