"""What an experiment found, and the model and text that all of them use.

Owns loading a model for experiments and reading its KV out of the pool. Each experiment has a file of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tokenizers import Tokenizer

from headrace.config import Config
from headrace.core.block import HashAlgorithm
from headrace.core.errors import InvalidRequest
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.model_runner import SequenceStep
from headrace.verify.library_text import cut

Report = Callable[[str], None]
Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows

TEXT = """A water mill stands beside a river. Above it a weir holds the river back, and a channel, the headrace, leads
some of the water along the hillside to the wheel. The channel is long and costs many days to dig, but it is dug once.
Afterwards every morning the miller lifts a gate, and the water that has come all the way is there at once. When he
closes the gate the channel stays full. In a dry summer he lets only as much through as the wheel needs; in a wet spring
the weir spills what he has no use for. The neighbour below has a mill too, and rather than dig a channel of his own
from the same weir he cuts a short one from the miller's. They share the long part and pay for it together. """


@dataclass(frozen=True, slots=True)
class Lesson:
    """One experiment: tables for people, the same figures as `facts` for scripts, and what they show in a sentence."""

    tables: tuple[Table, ...]
    facts: dict[str, Any]
    conclusion: str
    notes: tuple[str, ...] = field(default=())


def load_for_lesson(config: Config, *, pool_tokens: int, report: Report) -> LoadedModel:
    """The configured model with a pool of at least so many tokens, of which every layer can have all (`read_kv`), as if
    each block were another sequence's. Raises as `load_model` does."""
    num_blocks = max(2, -(-pool_tokens // config.engine.block_tokens))
    return load_model(
        config.model,
        replace(config.engine, pool_tokens=num_blocks * config.engine.block_tokens, batch_sequences_max=num_blocks),
        trust_group=config.gateway.trust_group,
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=report,
    )


def text_tokens(model: LoadedModel, num_tokens: int) -> list[int]:
    """The first tokens of a text without end."""
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False).ids
    return cut(ids, 0, num_tokens)


def fitting(model: LoadedModel, num_tokens: int, *, least: int) -> int:
    """`num_tokens`, or as many as the model's context has. Raises InvalidRequest below `least`."""
    fits = min(num_tokens, model.context_tokens_max)
    if fits < least:
        raise InvalidRequest(f"a context of {model.context_tokens_max} tokens is too short; {least} are needed")
    return fits


def compute_kv(model: LoadedModel, tokens: list[int], *, first_block: int = 0, start: int = 0) -> torch.Tensor:
    """Compute tokens [start, end) in one step, in the pool's blocks from `first_block` on; the logits of the last.

    What is before `start` must be there already. Returns [vocab] float32.
    """
    step = SequenceStep(tuple(tokens[start:]), start, block_table(model, len(tokens), first_block=first_block), 1)
    return model.runner.run_step([step])[0]


def read_kv(model: LoadedModel, num_tokens: int, *, first_block: int = 0) -> torch.Tensor:
    """The KV of the sequence whose blocks begin at `first_block`: `[num_layers, 2, num_kv_heads, tokens, head_dim]`."""
    blocks = [model.kv.block(block_id) for block_id in block_table(model, num_tokens, first_block=first_block)]
    return torch.cat(blocks, dim=3)[:, :, :, :num_tokens].cpu()


def block_table(model: LoadedModel, num_tokens: int, *, first_block: int = 0) -> tuple[int, ...]:
    """The blocks of such a sequence."""
    num_blocks = -(-num_tokens // model.kv.layout.block_tokens)
    return tuple(model.kv.whole_blocks(first_block + num_blocks)[first_block:])
