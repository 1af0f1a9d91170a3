"""Preallocated, grown and paged KV: memory held for nothing, bytes copied to grow, free room that cannot be used."""

import random
import time

import torch

from headrace.blocks.extents import ExtentPool
from headrace.config import Config
from headrace.engine.block_pool import BlockPool, Taken
from headrace.learn.lesson import Lesson, Report, load_for_lesson

SEQUENCES, SHORTEST, LONGEST, SEED = 400, 16, 2_048, 7
APPENDED_TOKENS = 512


def show_paging(config: Config, *, report: Report) -> Lesson:
    """Lay the same sequences out in three ways, and time one more token in a grown cache against a slot that is there.

    Lengths are drawn evenly on a logarithmic scale. Churn: sequences come and go at random while half of the room is in
    use; then the largest is asked for.
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
    contiguous, paged = _free_after_churn(lengths, layout.block_tokens)
    return Lesson(
        tables=(
            (
                f"{SEQUENCES} sequences of {SHORTEST} to {LONGEST:,} tokens, {used:,} together",
                ["way ", "tokens of room held", "in use", "tokens copied to grow"],
                [[way, f"{held[way]:,}", f"{used / held[way]:.1%}", f"{copied[way]:,}"] for way in held],
            ),
            (
                "After churn, of the room that is free: the longest sequence that still fits",
                ["way ", "free tokens", "longest that fits"],
                [["contiguous", *_pair(contiguous)], [f"blocks of {layout.block_tokens}", *_pair(paged)]],
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
            "free_tokens": contiguous[0],
            "longest_contiguous_tokens": contiguous[1],
            "longest_paged_tokens": paged[1],
            "grown_ms": grown_s * 1e3,
            "slots_ms": slot_s * 1e3,
        },
        conclusion=(
            "Room for the longest case is mostly empty, growing copies everything again and again, and contiguous room "
            "breaks into pieces. Blocks waste at most the rest of each sequence's last one, and any free block fits."
        ),
    )


def _pair(free: tuple[int, int]) -> list[str]:
    return [f"{free[0]:,}", f"{free[1]:,}"]


def _free_after_churn(lengths: list[int], block_tokens: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(free tokens, longest sequence that fits) of contiguous room and of a pool of blocks, after the same churn."""
    draw, room = random.Random(SEED), 2 * sum(lengths) // 5
    extents, pool = ExtentPool(room), BlockPool(room // block_tokens)
    running: list[tuple[int, int, tuple[int, ...]]] = []  # start, length, block ids
    for length in draw.choices(lengths, k=10 * len(lengths)):
        while sum(each[1] for each in running) + length > room // 2:
            start, ended, block_ids = running.pop(draw.randrange(len(running)))
            extents.release(start, ended)
            pool.unref_all(block_ids)
        start = extents.allocate(length)
        taken = pool.take(-(-length // block_tokens))
        if start is None or not isinstance(taken, Taken):
            continue
        running.append((start, length, taken.block_ids))
    longest = max(length for length in range(extents.free_units + 1) if _fits(extents, length))
    free_paged = pool.available_blocks * block_tokens
    return (extents.free_units, longest), (free_paged, free_paged)


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
