"""What was measured of a codec, for scripts and for people."""

from dataclasses import asdict, dataclass
from typing import Any

from headrace.engine.codec_bound import CodecBound
from headrace.verify.report import Table


@dataclass(frozen=True, slots=True)
class CodecReport:
    """One codec on one model."""

    model: str
    prefix_tokens: int  # of each prompt, coded
    generated_tokens: int  # of each prompt, compared
    bound: CodecBound

    def as_json(self) -> dict[str, Any]:
        """The report for scripts. Shares are of 1, KL is in nats."""
        figures = {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in asdict(self.bound).items()
        }
        lengths = {"prefix_tokens": self.prefix_tokens, "generated_tokens": self.generated_tokens}
        return {"model": self.model, **figures, **lengths}

    def table(self) -> Table:
        """One figure a line."""
        bound = self.bound
        rows = [
            ["bytes of a block, of raw", f"{bound.bytes_ratio:.3f}"],
            ["same greedy token, share of positions", f"{bound.greedy_agreement:.2%}"],
            ["same greedy text to its end, share of prompts", f"{bound.equal_texts:.1%}"],
            ["logit error, mean", f"{bound.logit_error_mean:.4f}"],
            ["logit error, largest", f"{bound.logit_error_max:.3f}"],
            ["KL divergence from raw, mean", f"{bound.kl_mean:.6f} nats"],
            ["perplexity of a text, raw", f"{bound.perplexity:.3f}"],
            ["its change", f"{bound.perplexity_change:+.3%}"],
        ]
        title = (
            f"{self.model}: KV codec {bound.codec} against raw, {bound.prompts:,} prompts of {self.prefix_tokens:,} "
            f"coded tokens, {self.generated_tokens:,} tokens compared after each"
        )
        return (title, ["figure ", bound.codec], rows)
