"""Are the bits the same whoever computes them? Tested on the real weights, and named by a digest.

This file owns the bitwise self-test that chooses how rows are padded, and the digest of a fixed prompt's KV bytes that
goes into the namespace: machines whose numerics differ then do not share blocks. It says nothing about whether the
numbers are right (`compare_forward.py` does).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.core.block import KvLayout
from headrace.engine.attention import TILE
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.packed_linear import PackedLinear
from headrace.engine.pad_rows import FEW_ROWS_MAX, HEAD_ROWS, MANY_ROWS_MIN
from headrace.engine.paged_kv import PagedKV

PROBE_TOKENS = TILE + 56  # crosses the tile grid, and is not a multiple of any row multiple below 8
STRANGER_TOKENS = 61

# Row multiples to try, cheapest first: 4 is enough for bfloat16 and for packed float32 where this was measured, plain
# float32 on two threads needed 8.
ROW_MULTIPLES = (4, 8, 16)

# Numbers of rows, in row multiples, that each linear layer is tried with.
LINEAR_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 16, 25, 32, 48, 64)

# Ends of tiles, in tiles, whose keys attention's products are tried with: libraries choose by such sizes how to cut.
PRODUCT_TILES = (1, 2, 3, 4, 5, 8, 9, 16, 32)

# Numbers of packed rows that they are tried with, beside the most.
PRODUCT_ROWS = (*range(HEAD_ROWS, FEW_ROWS_MAX + 1, HEAD_ROWS), MANY_ROWS_MIN, 68, 96, 124, 128, 192, 256, 320)


def probe_runner(model: PreTrainedModel, layout: KvLayout, *, row_multiple: int, threads: int) -> ModelRunner:
    """A runner over a small pool of its own, for the probes."""
    num_blocks = -(-PROBE_TOKENS // layout.block_tokens) + 2 * -(-(STRANGER_TOKENS + 8) // layout.block_tokens)
    kv = PagedKV(layout, num_blocks, device=model.device)
    return ModelRunner(model, kv, row_multiple=row_multiple, threads=threads)


@dataclass(frozen=True, slots=True)
class ExactRows:
    """How a runner computes rows for their bits to be fixed: padded so, and on so many threads where a step has few."""

    row_multiple: int
    small_threads_max: int


def find_exact_rows(model: PreTrainedModel, layout: KvLayout, *, threads: int) -> ExactRows | None:
    """The smallest row multiple under which no bit depends on chunking, batch or the number of threads of a small step.

    Where each of them leaves a bit that depends on the last, the smallest with which small steps stay on one thread;
    None when bits differ there, too.
    """
    on_one = None
    for row_multiple in ROW_MULTIPLES:
        runner = probe_runner(model, layout, row_multiple=row_multiple, threads=threads)
        if not _all_agree(runner, 1):
            continue
        if threads <= 1 or _all_agree(runner, threads):
            return ExactRows(row_multiple, max(1, threads))
        on_one = on_one or ExactRows(row_multiple, 1)
    return on_one


def probe_numerics(runner: ModelRunner) -> str:
    """Digest of the KV bytes of the probe prompt, computed in one piece; 32 hex digits.

    Independent of the block size: the bytes are digested in token order. Uses the runner's blocks 0.. as scratch.
    """
    prompt = _tokens(PROBE_TOKENS, runner, salt=1)
    table = list(range(-(-len(prompt) // runner.kv.layout.block_tokens)))
    runner.run_step([SequenceStep(prompt, 0, table, 0)])
    return hashlib.sha256(runner.kv.bytes_in_order(table, len(prompt))).hexdigest()[:32]


def _all_agree(runner: ModelRunner, threads: int) -> bool:
    return _linears_agree(runner, threads) and _products_agree(runner, threads) and _runs_agree(runner, threads)


def _runs_agree(runner: ModelRunner, threads: int) -> bool:
    """One prompt in one piece, in ragged pieces and single rows, and among strangers: equal KV bytes and logits.

    threads: of small steps, all but the one piece and what is compared with it.
    """
    block_tokens = runner.kv.layout.block_tokens
    prompt = _tokens(PROBE_TOKENS, runner, salt=1)
    strangers = [_tokens(STRANGER_TOKENS, runner, salt=salt) for salt in (2, 3)]
    tables, used = [], 0
    for length in (PROBE_TOKENS, STRANGER_TOKENS + 8, STRANGER_TOKENS + 8):
        blocks = -(-length // block_tokens)
        tables.append(list(range(used, used + blocks)))
        used += blocks
    table = tables[0][::-1]

    def piece(first: int, last: int) -> SequenceStep:
        return SequenceStep(prompt[first:last], first, table, 1)

    def stranger(which: int, first: int, last: int) -> SequenceStep:
        return SequenceStep(strangers[which][first:last], first, tables[1 + which], 1)

    middle, end = TILE + 1, PROBE_TOKENS
    runner.pin_threads(1)
    whole = runner.run_step([piece(0, end)])[0]
    whole_kv = runner.kv.bytes_in_order(table, end)
    alone = runner.run_step([stranger(0, 0, 30)])[0]
    runner.pin_threads(threads)

    cuts = (0, 77, TILE, middle, middle + 1, middle + 6, end - 1, end)
    ragged = [runner.run_step([piece(a, b)])[0] for a, b in pairwise(cuts)]
    if runner.kv.bytes_in_order(table, end) != whole_kv or not torch.equal(ragged[-1], whole):
        return False

    first = runner.run_step([stranger(0, 0, 30), piece(0, TILE)])
    second = runner.run_step([piece(TILE, middle), stranger(0, 30, 31), stranger(1, 0, STRANGER_TOKENS)])
    third = runner.run_step([stranger(0, 31, 32), piece(middle, end)])
    # Single rows of one tile go as one batch of products.
    row, last = TILE // 2, STRANGER_TOKENS - 1
    alone_in_tile = runner.run_step([piece(row, row + 1)])[0]
    in_batch = runner.run_step([piece(row, row + 1), stranger(1, last, last + 1), stranger(0, 32, 33)])
    return (
        runner.kv.bytes_in_order(table, end) == whole_kv
        and torch.equal(first[0], alone)
        and torch.equal(first[1], ragged[1])
        and torch.equal(second[0], ragged[2])
        and torch.equal(third[1], whole)
        and torch.equal(in_batch[0], alone_in_tile)
        and torch.equal(in_batch[1], second[2])
    )


@torch.inference_mode()
def _linears_agree(runner: ModelRunner, threads: int) -> bool:
    """Each shape of linear layer: a row's bits are the same among few rows as among many. threads: of small steps."""
    for linear in _distinct_linears(runner.model):
        rows_max = LINEAR_ROWS[-1] * runner.row_multiple
        rows = _numbers(runner, 1, rows_max, linear.in_features)
        runner.pin_threads(1)
        runner.use_threads(rows_max)
        reference = linear(rows)
        runner.pin_threads(threads)
        for multiples in LINEAR_ROWS:
            count = multiples * runner.row_multiple
            runner.use_threads(count)
            if not torch.equal(linear(rows[:, -count:]), reference[:, -count:]):
                return False
    return True


@torch.inference_mode()
def _products_agree(runner: ModelRunner, threads: int) -> bool:
    """Attention's two products, at contexts longer than the probe's prompts: a row's bits are the same in a whole tile
    as among few rows, of one sequence or of several. threads: for the few."""
    heads, head_dim = runner.kv.layout.num_kv_heads, runner.kv.layout.head_dim
    agree = True
    context_tokens_max = getattr(runner.model.config, "max_position_embeddings", None) or PRODUCT_TILES[-1] * TILE
    for tiles in PRODUCT_TILES:
        if (tiles - 1) * TILE >= context_tokens_max:
            break
        keys, queries = (_numbers(runner, heads, count, head_dim) for count in (tiles * TILE, 3 * TILE))
        torch.set_num_threads(1)
        whole = torch.bmm(queries, keys.transpose(1, 2))
        whole_result = torch.bmm(torch.softmax(whole, dim=-1), keys)
        torch.set_num_threads(threads)
        for count, sequences in product(PRODUCT_ROWS, (1, 4)):
            several = keys.repeat(sequences, 1, 1)
            for rows in (slice(count), slice(-count, None)):
                scores = torch.bmm(queries[:, rows].repeat(sequences, 1, 1), several.transpose(1, 2))
                result = torch.bmm(torch.softmax(scores, dim=-1), several)
                agree &= torch.equal(scores, whole[:, rows].repeat(sequences, 1, 1))
                agree &= torch.equal(result, whole_result[:, rows].repeat(sequences, 1, 1))
            if not agree:
                return False
    return agree


def _numbers(runner: ModelRunner, *shape: int) -> torch.Tensor:
    """Fixed numbers as the model has them."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(device=runner.model.device, dtype=runner.model.dtype)


def _distinct_linears(model: nn.Module) -> Iterator[nn.Linear | PackedLinear]:
    """One linear layer of each shape."""
    seen = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | PackedLinear):
            shape = (type(module), module.in_features, module.out_features)
            if shape not in seen:
                seen.add(shape)
                yield module


def _tokens(count: int, runner: ModelRunner, *, salt: int) -> tuple[int, ...]:
    """Fixed token ids, spread over the vocabulary."""
    vocab_size = runner.model.config.vocab_size
    return tuple((7_919 * (index + 1) * salt + index * index) % vocab_size for index in range(count))
