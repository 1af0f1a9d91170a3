"""What a KV codec was measured to do to a model's answers: `headrace verify --codec` writes it, starts show it.

Owns the record in the model cache directory (`checks/`, as the other self-tests) and its line for people. How it is
measured is `verify/measure_codec.py`'s.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config import POOL_CODECS, EngineSettings, ModelSettings
from headrace.engine.convert_gguf import model_cache_dir
from headrace.engine.model_digests import read_check, weights_digest, write_check


@dataclass(frozen=True, slots=True)
class CodecBound:
    """Answers on coded KV against answers on raw KV. Logits in their own units, KL in nats."""

    codec: str
    bytes_ratio: float  # coded / raw bytes of a block
    prompts: int
    positions: int  # at which logits were compared, all prompts together
    greedy_agreement: float  # share of positions at which the most likely token is the same
    equal_texts: float  # share of prompts whose greedy text is the same to its end
    logit_error_max: float
    logit_error_mean: float
    kl_mean: float
    perplexity: float  # of the text on raw KV
    perplexity_change: float  # coded / raw - 1

    def line(self) -> str:
        """One line for people."""
        return (
            f"measured on {self.prompts:,} prompts: the same greedy token at {self.greedy_agreement:.1%} of positions, "
            f"logits {self.logit_error_mean:.3f} apart in the mean and {self.logit_error_max:.2f} at most, "
            f"perplexity {self.perplexity_change:+.2%}"
        )


def codec_line(settings: ModelSettings, engine: EngineSettings, path: Path) -> str:
    """What these settings' codec means for answers, with its measured bound; "" where nothing is lost.

    path: the model's directory.
    """
    codec = lossy_codec(engine)
    if codec is None:
        return ""
    bound = read_bound(settings, engine, path, codec=codec)
    measured = bound.line() if bound else f"not measured for this model here: headrace verify --codec {codec}"
    if engine.pool_codec == "raw":
        return f"KV codec {codec} of the store: what is reused from it is not exact; {measured}"
    return f"KV codec {codec} of the pool: reuse changes nothing, but answers are not those of raw KV; {measured}"


def lossy_codec(engine: EngineSettings) -> str | None:
    """The codec (KvLayout.codec) in which these settings keep KV, when it is not the model's own numbers."""
    codec = POOL_CODECS[engine.pool_codec] if engine.store_codec == "raw" else engine.store_codec
    return None if codec == "raw" else codec


def read_bound(settings: ModelSettings, engine: EngineSettings, path: Path, *, codec: str) -> CodecBound | None:
    """What was measured for this model, number format, block size and codec; None when nothing was."""
    found = read_check(model_cache_dir(settings), _key(settings, engine, path, codec))
    return CodecBound(**found) if found is not None and set(found) == set(CodecBound.__slots__) else None


def write_bound(bound: CodecBound, settings: ModelSettings, engine: EngineSettings, path: Path) -> None:
    """Remember a measurement."""
    write_check(model_cache_dir(settings), _key(settings, engine, path, bound.codec), asdict(bound))


def _key(settings: ModelSettings, engine: EngineSettings, path: Path, codec: str) -> dict[str, Any]:
    """The number format is the setting's: a start has this line before it has read the weights."""
    return {
        "what": "codec bound",
        "weights": weights_digest(path, model_cache_dir(settings)),
        "dtype": settings.dtype,
        "block_tokens": engine.block_tokens,
        "codec": codec,
    }
