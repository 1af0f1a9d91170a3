"""A real store node behind a link that is slow, stalls or drips: the answer comes, the same, without waiting.
How soon exactly is told on virtual time, by tests/sim/test_overtake.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import pytest

from headrace.core.block import CacheSource
from headrace.core.generation import CacheControl
from headrace.core.learned_costs import PRIOR_PREFILL
from headrace.core.limits import LOAD_PREFIX_TIMEOUT_MS
from headrace.core.members import StoreNodeRecord
from headrace.core.overtake_limits import OVERTAKE_ROUND_TRIP_MAX_MS

from .conftest import BLOCK_TOKENS, TestWorker

pytestmark = pytest.mark.alone
NUM_BLOCKS = 60  # 4 KiB each
READS_ONLY = CacheControl(publish=False)
REMOTE_ONLY = CacheControl(sources=frozenset({CacheSource.GRPC}))


@dataclass
class SlowLink:
    """What passes from the node to its readers, in bytes: all at once for the first, then at a pace."""

    address: str = ""
    fast_bytes: float = float("inf")
    bytes_per_s: float = float("inf")

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_slow: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1024):
                if is_slow and self.fast_bytes < len(data):
                    await asyncio.sleep(len(data) / self.bytes_per_s if self.bytes_per_s else 3_600)
                elif is_slow:
                    self.fast_bytes -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def slow_link(target: str) -> AsyncIterator[SlowLink]:
    """A TCP proxy in front of `target`."""
    link, (host, port) = SlowLink(), target.rsplit(":", 1)
    carrying: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_node, to_node = await asyncio.open_connection(host, int(port))
        for work in (link.carry(reader, to_node, is_slow=False), link.carry(from_node, writer, is_slow=True)):
            carrying.add(asyncio.create_task(work))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    link.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def knows_its_speed(worker: TestWorker, prompts: Callable[..., list[int]]) -> None:
    """Have a worker compute something, so that it knows what loading may cost."""
    await worker.cold(prompts(200, salt=77))
    assert worker.worker.engine.load().ahead.prefill != PRIOR_PREFILL


@pytest.mark.parametrize(
    ("fast_bytes", "bytes_per_s"),
    [(0, 20_000), (100_000, 0), (40_000, 0), (0, 2_000)],
    ids=["slow", "stalls in the middle", "stalls at the start", "drips"],
)
async def test_a_source_that_delivers_too_slowly_is_overtaken_with_the_same_answer(
    fast_bytes: float,
    bytes_per_s: float,
    store_node,
    membership,
    make_worker: Callable[..., Awaitable[TestWorker]],
    prompts: Callable[..., list[int]],
) -> None:
    """Fails when a request waits for its load until a time limit, or what overtakes it differs in a bit."""
    near = await make_worker("near")
    token_ids = prompts(NUM_BLOCKS * BLOCK_TOKENS + 3)
    cold = await near.decode(token_ids)
    await near.published()
    async with slow_link(store_node.record.address) as link:
        # Under another name: under its own the node announces itself again and again, at its own address.
        behind: StoreNodeRecord = replace(store_node.record, node_id="behind", host="behind", address=link.address)
        await membership.announce(behind, ttl_ms=600_000)
        far = await make_worker("far", near=False, load_patience_ms=OVERTAKE_ROUND_TRIP_MAX_MS)
        await knows_its_speed(far, prompts)
        # Nothing is published through the link: what is under way when it stalls would stay reserved for seconds.
        warm = await far.decode(prompts(3 * BLOCK_TOKENS + 1, salt=5), cache=READS_ONLY, hint_nodes=("behind",))
        assert warm.cached.total == 0
        link.fast_bytes, link.bytes_per_s = fast_bytes, bytes_per_s
        started_s = time.monotonic()
        reply = await far.decode(token_ids, cache=READS_ONLY, hint_nodes=("behind",))
        assert time.monotonic() - started_s < LOAD_PREFIX_TIMEOUT_MS / 2_000
        assert reply.same_answer_as(cold)
        assert reply.cached.total < NUM_BLOCKS * BLOCK_TOKENS
        link.fast_bytes = float("inf")
        await store_node_at_rest(store_node)


async def test_a_fast_source_is_not_overtaken(
    store_node, membership, make_worker: Callable[..., Awaitable[TestWorker]], prompts: Callable[..., list[int]]
) -> None:
    """Fails when a load that is worth it is cut."""
    near = await make_worker("near")
    far = await make_worker("far", near=False, load_patience_ms=OVERTAKE_ROUND_TRIP_MAX_MS)
    token_ids = prompts(NUM_BLOCKS * BLOCK_TOKENS + 3)
    await near.decode(token_ids)
    await near.published()
    await knows_its_speed(far, prompts)
    for _ in range(20):  # a loaded machine may be as slow as any network; not each time
        reply = await far.decode(token_ids, cache=REMOTE_ONLY, hint_nodes=("node-1",))
        if reply.cached.grpc == NUM_BLOCKS * BLOCK_TOKENS:
            return
    raise AssertionError(reply.cached)


async def store_node_at_rest(service) -> None:
    """Until no lease stands: what was cut short is given back by the one who cut it."""
    async with asyncio.timeout(60):
        while service.node.stat().leased_blocks:  # noqa: ASYNC110 (a node has no event for this)
            await asyncio.sleep(0.05)
