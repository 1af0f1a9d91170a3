"""Random companies on an engine that does everything at once: drafts, windows, a pool too small, and a restless owner.

As in `test_random_company.py` every answer and every block must be the right one, and the books must balance. Besides
arrivals, cancels, preemption and reloads that fail there are drafts that are partly wrong, models that read a window
only, blocks with a time to live, slow consumers, and a pool whose blocks are forgotten, evicted and expire all the
time. A failure names its seed.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from headrace.core.key_window import model_window
from headrace.engine.block_pool import BlockPool
from headrace.engine.drafter import Draft, DraftWish
from headrace.engine.engine import Engine
from headrace.engine.pool_values import Selection

from .conftest import BLOCK_TOKENS, VOCAB, until
from .hashed_model import expected_answer, make_hashed_engine
from .test_random_company import Ask, make_ask, serve_all

MakeEngine = Callable[..., Engine]

SEQUENCE_BLOCKS = 12  # of the longest sequence: a head of 55 tokens, 11 more, and 25 of the answer
DISTURBANCES = ("forget", "evict", "expire", *["evict a few"] * 5)  # few, so that something stays to be disturbed
WINDOWS = (3, 9, 12, 24, 40)  # tokens: less than a block, a block and its edge, and several blocks


class TickingClock:
    """A millisecond passes whenever somebody looks: a step takes as long with drafts as without, so drafts pay."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)  # its `next` is atomic: the step thread looks, too

    def now_s(self) -> float:
        return next(self._ticks) / 1_000

    def unix_ms(self) -> int:
        return next(self._ticks)


class Guesser:
    """Drafts what the model will say, with one token in four wrong, and nothing one time in five."""

    costs_steps = False

    def __init__(self, seed: int, *, window_tokens: int | None) -> None:
        self._rng = random.Random(seed)  # the step thread's own
        self._window_tokens = window_tokens
        self.drafts_for: set[int] = set()  # keys of those who have not left

    def token_s(self) -> float:
        return 0.0

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        self.drafts_for.update(wish.key for wish in wishes)
        return [Draft(self._guess(wish)) if self._rng.random() < 0.8 else Draft() for wish in wishes]

    def leave(self, key: int) -> None:
        self.drafts_for.discard(key)

    def _guess(self, wish: DraftWish) -> tuple[int, ...]:
        right = expected_answer(wish.token_ids, wish.most, window_tokens=self._window_tokens)
        return tuple(self._rng.randrange(1, VOCAB) if self._rng.random() < 0.25 else token for token in right)


def make_restless_engine(make_engine: MakeEngine, rng: random.Random) -> tuple[Engine, Guesser | None]:
    """An engine that has room for one of the longest sequences at least, and never for two; maybe with drafts."""
    window_tokens = rng.choice(WINDOWS) if rng.random() < 0.5 else None
    guesser = Guesser(rng.randrange(1_000), window_tokens=window_tokens) if rng.random() < 0.8 else None
    room = model_window((window_tokens,), block_tokens=BLOCK_TOKENS).held_blocks(SEQUENCE_BLOCKS)
    engine = make_hashed_engine(
        make_engine,
        num_blocks=rng.randrange(room, 2 * room),
        window_tokens=window_tokens,
        drafter=guesser,
        clock=TickingClock(),
        chunk=rng.choice((3, 8, 20, 64)),
        batch=rng.randrange(2, 7),
    )
    return engine, guesser


def make_company(rng: random.Random, engine: Engine) -> list[Ask]:
    heads = [rng.choices(range(1, VOCAB), k=rng.randrange(BLOCK_TOKENS, 7 * BLOCK_TOKENS)) for _ in range(3)]
    return [
        replace(
            make_ask(rng, engine, heads, kind="tight"),
            max_tokens=rng.choice((0, 3, 12, 25, 25)),
            ttl_s=rng.choice((math.inf, 0.02)),  # of the ticking clock
            pause_s=rng.choice((0.0, 0.0, 0.001, 0.003)),
        )
        for _ in range(20)
    ]


def disturb(pool: BlockPool, rng: random.Random) -> None:
    """Do one of the things that an owner of the pool may do at any moment, to all blocks or to a few."""
    match rng.choice(DISTURBANCES):
        case "forget":
            pool.forget(Selection())
        case "evict":
            pool.evict(Selection(), dry_run=False)
        case "evict a few":
            pool.evict(Selection(blocks_max=rng.randrange(1, 6)), dry_run=False)
        case "expire":
            pool.evict_expired()
    pool.check_integrity()


async def disturb_for_ever(pool: BlockPool, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0, 0.003))
        disturb(pool, rng)


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_is_done_at_once_answers_are_right_and_nothing_stays_behind(
    make_engine: MakeEngine, seed: int
) -> None:
    """Fails if a block of a draft's wrong tokens is shared, one is given away that a window still reads, a parent is
    evicted before its child, bytes that were not read back are taken for a block's, or somebody who has ended is still
    counted anywhere."""
    rng = random.Random(2_000 + seed)
    engine, guesser = make_restless_engine(make_engine, rng)
    company = make_company(rng, engine)
    async with asyncio.TaskGroup() as group:
        owner = group.create_task(disturb_for_ever(engine.pool, random.Random(seed)))
        await serve_all(engine, company)
        owner.cancel()
    await until(lambda: engine.load().running + engine.load().waiting == 0)  # those who went are ended by the next step
    while engine.pool.kept_blocks:
        assert engine.pool.evict(Selection(blocks_max=1), dry_run=False).num_blocks == 1
        engine.pool.check_integrity()
    assert engine.steps.num_without_blocks == 0
    assert engine.load().ahead.queue_s == 0, "something is still to be computed"
    assert guesser is None or not guesser.drafts_for, "who has ended is drafted for"
