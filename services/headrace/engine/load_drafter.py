"""From the setting `speculation` to a drafter, and what is said where it cannot be.

This file owns that choice. It knows nothing of steps.
"""

from collections.abc import Callable
from dataclasses import replace

from headrace.config import EngineSettings, ModelSettings
from headrace.core.clock import Clock
from headrace.core.draft_limits import DRAFT_POOL_SEQUENCE_TOKENS
from headrace.core.errors import ModelRefused
from headrace.core.key_window import KeyWindow
from headrace.engine.check_model import check_tokens, no_draft_model
from headrace.engine.draft_model import ModelDrafter
from headrace.engine.draft_ngram import NgramDrafter
from headrace.engine.drafter import NGRAM, OFF, Drafter
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.make_pool import with_pool


def load_drafter(
    target: LoadedModel, model: ModelSettings, engine: EngineSettings, *, clock: Clock, report: Callable[[str], None]
) -> Drafter | None:
    """The drafter that `engine.speculation` asks for; None where it is off. `report` gets lines for people.

    A draft model is loaded as `load_model` does it, with a pool of its own. Raises ConfigInvalid when its tokens are
    not the target's or it cannot be loaded.
    """
    if engine.speculation == OFF:
        return None
    if not target.exact:
        report(
            f"{target.name}: exact mode is off, so answers with drafts may differ from those without where two tokens "
            "are nearly equally likely"
        )
    if engine.speculation == NGRAM:
        return NgramDrafter()
    draft = _load_draft_model(target, model, engine, report=report)
    check_tokens(target.name, target.path, draft.name, draft.path)
    return ModelDrafter(
        draft,
        vocab_tokens=int(target.runner.model.config.vocab_size),
        step_tokens=engine.prefill_chunk_tokens,
        clock=clock,
    )


def _load_draft_model(
    target: LoadedModel, model: ModelSettings, engine: EngineSettings, *, report: Callable[[str], None]
) -> LoadedModel:
    """The small model, not exact (its numbers only guess), with a pool for the sequences of one batch."""
    sequence_tokens = min(target.context_tokens_max, DRAFT_POOL_SEQUENCE_TOKENS)
    blocks = engine.batch_sequences_max * (sequence_tokens // engine.block_tokens + 1)
    try:
        draft = load_model(
            replace(model, model=engine.speculation, exact=False, attention_backend="gather"),
            replace(
                engine,
                pool_tokens=blocks * engine.block_tokens,
                context_tokens_max=0,
                store_codec="raw",
                pool_codec="raw",
            ),
            trust_group="",
            hash_algorithm=target.namespace.hash_algorithm,
            report=lambda line: report(f"draft model: {line}"),
        )
    except ModelRefused as error:
        raise no_draft_model(error) from error
    size, target_size = _weight_bytes(draft), _weight_bytes(target)
    if 2 * size > target_size:
        report(
            f"draft model: {draft.name} has {size / 1e6:,.0f} MB of weights, {target.name} {target_size / 1e6:,.0f}: "
            "drafts that take as long as what they spare will not be made; choose a smaller one"
        )
    return draft if draft.windows.widest is None else _with_windows(draft, engine, blocks=blocks)


def _with_windows(draft: LoadedModel, engine: EngineSettings, *, blocks: int) -> LoadedModel:
    """With a smaller pool, in which each sequence of a batch holds what its layers read: two windows and two blocks of
    those that have one, and the draft behind."""
    num_blocks = blocks // engine.batch_sequences_max
    draft_blocks = -(-engine.draft_tokens // engine.block_tokens)

    def held(window: KeyWindow) -> int:
        return engine.batch_sequences_max * min(num_blocks, window.held_blocks(num_blocks) + draft_blocks)

    return with_pool(draft, num_blocks=held(draft.window), num_near=held(draft.near_window))


def _weight_bytes(model: LoadedModel) -> int:
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in model.path.glob(pattern))
