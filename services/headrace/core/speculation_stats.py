"""What speculative decoding came to in one engine, as it crosses to metrics and reports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Since the engine started; only ever rising."""

    drafted_tokens: int = 0  # that were computed
    accepted_tokens: int = 0  # of those, the ones that the model chose itself
    gain_s: float = 0.0  # what the accepted ones would have taken in steps of their own
    cost_s: float = 0.0  # what drafting took, and the rows of drafts, by measured step times
    failure: str = ""  # why there are no more drafts

    @property
    def acceptance(self) -> float:
        """Accepted of drafted tokens, 0 before the first."""
        return self.accepted_tokens / max(1, self.drafted_tokens)
