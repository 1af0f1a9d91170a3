"""How far FlexAttention's logits are from the gathering attention's and from plain transformers', on this machine.

    .venv/bin/python benchmarks/flex_attention.py [--compiled] [model directory ...]

Each model in each number format: a prompt in chunks of 100 and then 16 rows one by one, beside a stranger that gets
one row at a time. Printed are the largest differences of a logit, relative to the largest logit. `gather` beside
`transformers` says how far two ways are apart that nobody doubts. With --compiled torch's compiler makes kernels
(minutes; on a CPU it needs g++, and sinks are not done). Without directories: the built-in model.
"""

import argparse
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headrace.config import ModelSettings
from headrace.core.block import KvLayout
from headrace.engine.attention import ATTENTION_NAME, Attention, attend_gathered, register_attention
from headrace.engine.flex_attention import FlexAttention
from headrace.engine.load_model import find_model
from headrace.engine.load_weights import load_weights
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.paged_kv import PagedKV
from headrace.engine.probe_shapes import probe_shapes

BLOCK_TOKENS, PROMPT_TOKENS, CHUNK_TOKENS, SINGLE_ROWS = 16, 400, 100, 16


def main() -> None:
    """Print one line for each model and number format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("directories", nargs="*", type=Path)
    arguments = parser.parse_args()
    register_attention()
    torch.set_num_threads(1)
    flex = FlexAttention(compiled=arguments.compiled)
    print(
        f"{'model':<24}{'numbers':<10}{'flex - gather':>15}{'flex - transf.':>16}{'gather - transf.':>18}{'seconds':>9}"
    )
    for path in arguments.directories or [find_model(ModelSettings(), report=print)[1]]:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            print(_line(path, dtype, flex), flush=True)


@torch.inference_mode()
def _line(path: Path, dtype: torch.dtype, flex: Attention) -> str:
    prompt = _tokens(PROMPT_TOKENS, load_weights(path).config.vocab_size)
    plain = load_weights(path, dtype=dtype, attn_implementation="eager")
    wanted = plain(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    model = load_weights(path, dtype=dtype, attn_implementation=ATTENTION_NAME)
    gathered = _logits(model, prompt, attend_gathered)
    started_s = time.perf_counter()
    found = _logits(model, prompt, flex)
    took_s = time.perf_counter() - started_s
    which = [position for position, _ in _rows(prompt)]
    apart = (_difference(found, gathered), _difference(found, wanted[which]), _difference(gathered, wanted[which]))
    return f"{path.name:<24}{str(dtype)[6:]:<10}{apart[0]:>15.2g}{apart[1]:>16.2g}{apart[2]:>18.2g}{took_s:>9.0f}"


def _rows(prompt: tuple[int, ...]) -> list[tuple[int, int]]:
    """(last position, first position) of each step."""
    chunks_end = PROMPT_TOKENS - SINGLE_ROWS
    cuts = [*range(0, chunks_end, CHUNK_TOKENS), *range(chunks_end, PROMPT_TOKENS + 1)]
    return [(last - 1, first) for first, last in pairwise(cuts)]


def _logits(model: PreTrainedModel, prompt: tuple[int, ...], attention: Attention) -> torch.Tensor:
    """[steps, vocab]"""
    probe = probe_shapes(model)
    kv_heads, head_dim, _ = probe.shapes[0]
    layout = KvLayout(str(model.dtype)[6:], len(probe.shapes), kv_heads, head_dim, BLOCK_TOKENS)
    num_blocks = PROMPT_TOKENS // BLOCK_TOKENS
    kv = PagedKV(layout, num_blocks + 2)
    kv.pool.fill_(torch.nan)  # whatever is read and was not written shows
    runner = ModelRunner(model, kv, row_multiple=1, threads=1, attention=attention)
    table, found = list(range(num_blocks))[::-1], []
    for number, (last, first) in enumerate(_rows(prompt)):
        stranger = SequenceStep(prompt[number : number + 1], number, (num_blocks, num_blocks + 1), 0)
        found.append(runner.run_step([SequenceStep(prompt[first : last + 1], first, table, 1), stranger])[0])
    return torch.stack(found)


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def _tokens(count: int, vocab_size: int) -> tuple[int, ...]:
    """Fixed token ids, spread over the vocabulary."""
    return tuple((7_919 * (index + 1) + index * index) % vocab_size for index in range(count))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
