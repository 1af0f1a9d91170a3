"""From the setting `speculation` to a drafter, and what is said where it cannot be.

This file owns that choice. It knows nothing of steps.
"""

from collections.abc import Callable
from dataclasses import replace

from headrace.config import EngineSettings, ModelSettings
from headrace.core.clock import Clock
from headrace.core.draft_limits import DRAFT_POOL_SEQUENCE_TOKENS
from headrace.core.errors import ModelRefused
from headrace.engine.check_model import check_tokens, no_draft_model
from headrace.engine.draft_model import ModelDrafter
from headrace.engine.draft_ngram import NgramDrafter
from headrace.engine.drafter import NGRAM, OFF, Drafter
from headrace.engine.load_model import LoadedModel, load_model


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
            replace(model, model=engine.speculation, exact=False),
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
    return draft


def _weight_bytes(model: LoadedModel) -> int:
    return sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in model.path.glob(pattern))
