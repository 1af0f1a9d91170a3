"""What a diagnosis means, in sentences with its numbers in them. Pure: a Diagnosis in, text out."""

from collections.abc import Iterable, Iterator

from headrace.diagnose.diagnose_model import Diagnosis, MemoryRow, StepRow

# From so many times its least on, what a step takes beside that is worth a sentence.
OVERHEAD_RATIO = 2.0


def give_advice(found: Diagnosis) -> list[str]:
    """Sentences, the most general first: what limits prefill and decode, what batching and short contexts buy, what
    memory allows."""
    return [*_balance(found), *_prefill(found), *_decode(found), *_crossover(found), *_kv(found)]


def _balance(found: Diagnosis) -> Iterator[str]:
    limits = found.limits
    where = "its GPU" if found.device == "cuda" else f"{found.threads} threads"
    yield (
        f"This machine does {limits.flops_per_s / 1e9:,.0f} GFLOP/s in {found.dtype} and reads "
        f"{limits.bytes_per_s / 1e9:,.1f} GB/s on {where}: work with fewer than {limits.balance:,.1f} operations a "
        "byte waits for memory."
    )


def _prefill(found: Diagnosis) -> Iterator[str]:
    rows = [row for row in found.steps if row.what == "prefill"]
    if not rows:
        return
    last = rows[-1]
    yield (
        f"Prefill of {last.tokens} tokens does {last.work.intensity:,.0f} operations a byte: {_limited(last)}. It "
        f"takes {last.measured_ms:,.1f} ms ({_rate(last)} tokens/s), {last.ratio:.1f} times the least."
    )
    bound = next((row for row in rows if row.limit == "compute"), None)
    if bound is not None:
        yield (
            f"From {bound.tokens} tokens in a step on, arithmetic limits prefill: there each cached token saves its "
            "whole time."
        )
    if len(rows) > 1:
        yield (
            f"In steps of {_list(str(row.tokens) for row in rows)} tokens a prompt is computed at "
            f"{_list(map(_rate, rows))} tokens/s: so much a smaller prefill_chunk_tokens costs, and the shorter are "
            "the gaps of streams beside it."
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
    if found.num_experts > 1:
        yield (
            f"All {found.num_experts} experts of each layer count in that; a step of few sequences reads those that it "
            "uses, so its floor is lower."
        )
    if one.ratio > OVERHEAD_RATIO:
        yield (
            "What is above the floor is weights that are read at less than the full rate, and the work around the "
            "products (many small operators and the calls between them); batching shares both among sequences."
        )
    widest = max((row for row in rows if row.tokens == one.tokens), key=lambda row: row.batch)
    gain = widest.batch * one.measured_ms / widest.measured_ms
    if widest.batch > 1:
        yield (
            f"A batch of {widest.batch} gives {gain:.1f} times the tokens per second of one sequence (a step of "
            f"{widest.measured_ms:,.1f} ms)."
        )


def _crossover(found: Diagnosis) -> Iterator[str]:
    rounded = {context: None if at is None else round(at) for context, at in found.compute_bound_batch.items()}
    crossing, before = list[str](), 0
    for context, at in rounded.items():
        if at is not None and at != before:
            crossing.append(f"{at:,} " + (f"with contexts of {context:,} tokens" if context else "without context"))
            before = at
    if crossing:
        yield (
            f"Decoding stops being limited by memory at a batch of {_list(crossing)}: until then one more sequence "
            "makes a step longer by its KV only."
        )
    never = [context for context, at in rounded.items() if at is None]
    if never:
        yield (
            f"With contexts of {never[0]:,} tokens and more it never does: each sequence's KV takes longer to read "
            "than its arithmetic takes, so that larger batches only share the weights."
        )


def _kv(found: Diagnosis) -> Iterator[str]:
    work, longest = found.work, found.context_tokens_max
    yield f"A token's KV is {work.kv_token_bytes:,} bytes.{_windows(found)}"
    most = _sequences(found.memory[-1])
    passes = [
        row
        for row in found.memory
        if row.kv_passes_weights_tokens is not None and row.kv_passes_weights_tokens <= longest
    ]
    if passes:
        yield (
            f"With {_sequences(passes[0])} of {passes[0].kv_passes_weights_tokens:,} tokens a decode step reads as "
            "much KV as weights, and beyond that more."
        )
    else:
        yield f"Up to {most} of the whole context ({longest:,} tokens), a decode step reads more weights than KV."
    full = [row for row in found.memory if row.fit_tokens is not None and row.fit_tokens < longest]
    if full:
        ways = [f"{_sequences(row)} of {row.fit_tokens:,} tokens" for row in dict.fromkeys((full[0], full[-1]))]
        yield (
            f"{found.free_bytes / 1e9:,.1f} GB are free for KV, which {' or '.join(ways)} fill; beyond that sequences "
            f"wait, or are computed again.{_int8(found)}"
        )
    else:
        yield (
            f"{found.free_bytes / 1e9:,.1f} GB are free for KV: room for {most} of the whole context of {longest:,} "
            "tokens."
        )


def _int8(found: Diagnosis) -> str:
    """What pool_codec would make of it."""
    if found.int8_token_bytes is None:
        return ""
    times = found.work.kv_token_bytes / found.int8_token_bytes
    return f" With pool_codec int8 it is room for {times:.1f} times as many tokens, at a loss (docs/codecs.md)."


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


def _rate(row: StepRow) -> str:
    """Tokens of a prompt in a second."""
    return f"{row.tokens / row.measured_ms * 1e3:,.0f}"


def _list(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _limited(row: StepRow) -> str:
    return "memory is the limit" if row.limit == "bandwidth" else "arithmetic is the limit"
