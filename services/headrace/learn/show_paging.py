"""Preallocated, grown and paged KV: memory held for nothing, bytes copied to grow, free room that cannot be used."""

import random
import time
from dataclasses import dataclass

import torch

from headrace.blocks.extents import ExtentPool
from headrace.config import Config
from headrace.engine.block_pool import BlockPool, Taken
from headrace.learn.lesson import Lesson, Report, load_for_lesson

SEQUENCES, SHORTEST, LONGEST, SEED = 400, 16, 2_048, 7
ARRIVALS, IN_USE_SHARE = 4_000, 0.9
APPENDED_TOKENS = 512


def show_paging(config: Config, *, report: Report) -> Lesson:
    """Lay the same sequences out in three ways, and time one more token in a grown cache against a slot that is there.

    Lengths are drawn evenly on a logarithmic scale. Churn: sequences come, and others go at random to make room for
    them in nine tenths of all there is; then the largest is asked for.
    """
    model = load_for_lesson(config, pool_tokens=0, report=report)
    layout = model.kv.layout
    draw = random.Random(SEED)
    lengths = [int(SHORTEST * (LONGEST / SHORTEST) ** draw.random()) for _ in range(SEQUENCES)]
    used = sum(lengths)
    held = {
        "preallocated": SEQUENCES * LONGEST,
        "grown": used,
        "paged": sum(-(-length // layout.block_tokens) * layout.block_tokens for length in lengths),
    }
    copied = {"preallocated": 0, "grown": sum(length * (length - 1) // 2 for length in lengths), "paged": 0}
    report("growing a cache token by token, and writing tokens into slots")
    grown_s, slot_s = (
        _seconds_to_grow(layout.shape, model.kv.dtype),
        _seconds_to_fill(layout.shape, model.kv.dtype),
    )
    contiguous, paged = _churn(lengths, layout.block_tokens)
    return Lesson(
        tables=(
            (
                f"{SEQUENCES} sequences of {SHORTEST} to {LONGEST:,} tokens, {used:,} together",
                ["way ", "tokens of room held", "in use", "tokens copied to grow"],
                [[way, f"{held[way]:,}", f"{used / held[way]:.1%}", f"{copied[way]:,}"] for way in held],
            ),
            (
                f"{ARRIVALS:,} of them come and go in room that is nine tenths full",
                ["way ", "free tokens at the end", "longest that fits", "turned away"],
                [["contiguous", *contiguous.cells()], [f"blocks of {layout.block_tokens}", *paged.cells()]],
            ),
            (
                f"Time for {APPENDED_TOKENS} tokens of KV, one by one",
                ["way ", "time"],
                [
                    ["grown (one copy of all for each)", f"{grown_s * 1e3:.0f} ms"],
                    ["written into slots", f"{slot_s * 1e3:.0f} ms"],
                ],
            ),
        ),
        facts={
            "used_share": {way: used / held[way] for way in held},
            "free_tokens": contiguous.free_tokens,
            "longest_contiguous_tokens": contiguous.longest_tokens,
            "longest_paged_tokens": paged.longest_tokens,
            "turned_away_contiguous": contiguous.turned_away,
            "turned_away_paged": paged.turned_away,
            "grown_ms": grown_s * 1e3,
            "slots_ms": slot_s * 1e3,
        },
        conclusion=(
            "Room for the longest case is mostly empty, growing copies everything again and again, and contiguous room "
            "breaks into pieces. Blocks waste at most the rest of each sequence's last one, and any free block fits."
        ),
    )


@dataclass(slots=True)
class _Churn:
    """What came of it, of one kind of room."""

    free_tokens: int = 0
    longest_tokens: int = 0  # that would still fit
    turned_away: int = 0  # sequences that found no room, though so many tokens were free

    def cells(self) -> list[str]:
        return [f"{self.free_tokens:,}", f"{self.longest_tokens:,}", f"{self.turned_away:,}"]


def _churn(lengths: list[int], block_tokens: int) -> tuple[_Churn, _Churn]:
    """Of contiguous room and of a pool of blocks of the same size, after the same arrivals and departures."""
    draw, room = random.Random(SEED), 2 * sum(lengths) // 5
    extents, pool = ExtentPool(room), BlockPool(room // block_tokens)
    contiguous, paged = _Churn(), _Churn()
    starts: list[tuple[int, int]] = []  # of those that run in contiguous room: start, length
    tables: list[tuple[int, tuple[int, ...]]] = []  # of those that run in blocks: length, block ids
    for length in draw.choices(lengths, k=ARRIVALS):
        while sum(each for _, each in starts) + length > IN_USE_SHARE * room:
            extents.release(*starts.pop(draw.randrange(len(starts))))
        while sum(each for each, _ in tables) + length > IN_USE_SHARE * room:
            pool.unref_all(tables.pop(draw.randrange(len(tables)))[1])
        if (start := extents.allocate(length)) is None:
            contiguous.turned_away += 1
        else:
            starts.append((start, length))
        taken = pool.take(-(-length // block_tokens))
        if isinstance(taken, Taken):
            tables.append((length, taken.block_ids))
        else:
            paged.turned_away += 1
    contiguous.free_tokens = extents.free_units
    contiguous.longest_tokens = max(length for length in range(extents.free_units + 1) if _fits(extents, length))
    paged.free_tokens = paged.longest_tokens = pool.available_blocks * block_tokens
    return contiguous, paged


def _fits(extents: ExtentPool, length: int) -> bool:
    if length == 0:
        return True
    start = extents.allocate(length)
    if start is not None:
        extents.release(start, length)
    return start is not None


def _seconds_to_grow(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    layers, two, heads, _, head_dim = shape
    token = torch.zeros((layers, two, heads, 1, head_dim), dtype=dtype)
    grown, started_s = token, time.perf_counter()
    for _ in range(APPENDED_TOKENS - 1):
        grown = torch.cat((grown, token), dim=3)
    assert grown.shape[3] == APPENDED_TOKENS
    return time.perf_counter() - started_s


def _seconds_to_fill(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    layers, two, heads, _, head_dim = shape
    token = torch.zeros((layers, two, heads, head_dim), dtype=dtype)
    room = torch.zeros((layers, two, heads, APPENDED_TOKENS, head_dim), dtype=dtype)
    started_s = time.perf_counter()
    for slot in range(APPENDED_TOKENS):
        room[:, :, :, slot] = token
    return time.perf_counter() - started_s
