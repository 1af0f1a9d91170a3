"""More sessions than the arena has room for: their blocks go to disk, come back, and change no answer."""

import random
from pathlib import Path

from headrace.config import StoreSettings
from headrace.core.block import CacheSource
from headrace.core.clock import SystemClock
from headrace.core.generation import CacheControl
from headrace.index.memory_index import MemoryIndex
from headrace.store.service import StoreNodeService

SESSIONS, TURNS, TURN_TOKENS = 12, 4, 60  # a session ends with 260 tokens: 32 blocks of 8 KiB, four sessions to a MiB
FROM_STORE = CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY, CacheSource.GRPC}))


async def test_twelve_sessions_over_an_arena_for_four_come_back_from_disk_unchanged(
    membership, tmp_path: Path, make_worker
) -> None:
    """Fails when a promoted block is another one, or when what left the arena is not found again."""
    clock = SystemClock()
    settings = StoreSettings(
        node_id="node-1", arena_mb=1, arena_dir=str(tmp_path), disk_gb=0.05, disk_dir=str(tmp_path / "disk")
    )
    service = StoreNodeService(settings, index=MemoryIndex(membership), membership=membership, clock=clock)
    try:
        await membership.announce(await service.start(), ttl_ms=60_000)
        worker = await make_worker("w1")
        rng = random.Random(4)
        sessions: list[list[int]] = [[] for _ in range(SESSIONS)]
        cached_tokens = 0
        for turn in range(TURNS):
            for session in sessions:
                session += [rng.randrange(1, 256) for _ in range(TURN_TOKENS)]
                reply = await worker.decode(session, cache=FROM_STORE, max_tokens=4)
                if turn in (1, TURNS - 1):
                    assert reply.same_answer_as(await worker.cold(session, max_tokens=4))
                session += reply.token_ids
                await worker.published()
                cached_tokens += reply.cached.total
                service.node.check_integrity()
        promoted = service.node.disk.counters.promoted_blocks
        assert promoted > SESSIONS, "nothing came from disk"
        # All but the last turn's tokens and the tail of a block were held when a session came back.
        asked = SESSIONS * sum(turn * (TURN_TOKENS + 4) for turn in range(TURNS))
        assert cached_tokens > 0.6 * asked
        assert worker.faults == []
    finally:
        await service.stop(remove_arena=True)
