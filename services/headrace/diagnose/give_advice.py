"""What a diagnosis means, in sentences with its numbers in them. Pure: a Diagnosis in, text out."""

from collections.abc import Iterator

from headrace.diagnose.diagnose_model import Diagnosis, MemoryRow, StepRow

# Steps that take so many times their least are limited by what is around them, not by arithmetic or memory.
OVERHEAD_RATIO = 2.0


def give_advice(found: Diagnosis) -> list[str]:
    """Sentences, the most general first: what limits prefill and decode, what batching and short contexts buy, what
    memory allows."""
    return [*_balance(found), *_prefill(found), *_decode(found), *_crossover(found), *_kv(found)]


def _balance(found: Diagnosis) -> Iterator[str]:
    limits = found.limits
    yield (
        f"This machine does {limits.flops_per_s / 1e9:,.0f} GFLOP/s in {found.dtype} and reads "
        f"{limits.bytes_per_s / 1e9:,.1f} GB/s on {found.threads} threads: work with fewer than {limits.balance:,.1f} "
        "operations a byte waits for memory."
    )


def _prefill(found: Diagnosis) -> Iterator[str]:
    rows = [row for row in found.steps if row.what == "prefill"]
    if not rows:
        return
    last = rows[-1]
    tokens_per_s = last.tokens / last.measured_ms * 1e3
    yield (
        f"Prefill of {last.tokens} tokens does {last.work.intensity:,.0f} operations a byte: {_limited(last)}. It "
        f"takes {last.measured_ms:,.1f} ms ({tokens_per_s:,.0f} tokens/s), {last.ratio:.1f} times the least."
    )
    bound = next((row for row in rows if row.limit == "compute"), None)
    if bound is not None:
        yield (
            f"From chunks of {bound.tokens} tokens on, prefill is limited by arithmetic: a larger prefill_chunk_tokens "
            "buys little, and each cached token saves its whole time."
        )


def _decode(found: Diagnosis) -> Iterator[str]:
    rows = [row for row in found.steps if row.what == "decode"]
    if not rows:
        return
    one = rows[0]
    yield (
        f"Decoding one sequence does {one.work.intensity:,.1f} operations a byte: {_limited(one)}. Its floor, reading "
        f"{found.work.step_bytes / 1e6:,.0f} MB of weights, is {one.least_ms:,.1f} ms; it takes {one.measured_ms:,.1f} "
        f"ms, {one.ratio:.1f} times that."
    )
    if one.ratio > OVERHEAD_RATIO:
        yield (
            "What is above the floor is neither arithmetic nor memory but the work around them (many small operators "
            "and the calls between them); batching shares it among sequences."
        )
    widest = max((row for row in rows if row.tokens == one.tokens), key=lambda row: row.batch)
    gain = widest.batch * one.measured_ms / widest.measured_ms
    if widest.batch > 1:
        yield (
            f"A batch of {widest.batch} gives {gain:.1f} times the tokens per second of one sequence (a step of "
            f"{widest.measured_ms:,.1f} ms)."
        )


def _crossover(found: Diagnosis) -> Iterator[str]:
    short, *longer = found.compute_bound_batch.items()
    batch = short[1]
    if batch is not None:
        yield (
            f"Without context, decoding stops being limited by memory at a batch of {batch:,.0f}: until then a step "
            "reads next to nothing more for one more sequence."
        )
    never = [context for context, at in longer if at is None]
    if never:
        yield (
            f"With contexts of {never[0]:,} tokens and more it never does: each sequence's KV takes longer to read "
            "than its arithmetic takes, so that larger batches only share the weights."
        )


def _kv(found: Diagnosis) -> Iterator[str]:
    work = found.work
    yield f"A token's KV is {work.kv_token_bytes:,} bytes.{_windows(found)}"
    passes = [row for row in found.memory if row.kv_passes_weights_tokens is not None]
    if passes:
        yield (
            f"With {_sequences(passes[0])} of {passes[0].kv_passes_weights_tokens:,} tokens a decode step reads as "
            "much KV as weights, and beyond that more."
        )
    else:
        yield "A decode step reads more weights than KV, however long its sequences are: their windows bound it."
    full = [row for row in found.memory if row.fit_tokens is not None]
    if full:
        ways = [f"{_sequences(row)} of {row.fit_tokens:,} tokens" for row in dict.fromkeys((full[0], full[-1]))]
        yield (
            f"{found.free_bytes / 1e9:,.1f} GB are free for KV, which {' or '.join(ways)} fill; beyond that sequences "
            "wait, or are computed again. int8 KV nearly doubles it."
        )
    else:
        yield (
            f"{found.free_bytes / 1e9:,.1f} GB are free for KV: room for {found.memory[-1].sequences} sequences, "
            "however long they are, since windows bound what they hold."
        )


def _windows(found: Diagnosis) -> str:
    """What windows make of it, where there are some."""
    windows = found.work.windows
    if windows.widest is None:
        return ""
    num_layers = sum(window is not None for window in windows.tokens)
    return (
        f" {num_layers} of {windows.num_layers} layers read the last {windows.widest:,} at most, and of theirs a "
        "sequence holds two windows and two blocks."
    )


def _sequences(row: MemoryRow) -> str:
    return "one sequence" if row.sequences == 1 else f"{row.sequences} sequences"


def _limited(row: StepRow) -> str:
    return "memory is the limit" if row.limit == "bandwidth" else "arithmetic is the limit"
