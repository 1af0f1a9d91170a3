"""What it costs to compute a prefix instead of reading it: the prefill model that eviction and simulations weigh with.

The constants are those of an 8B model on one H100-class GPU (`step_costs.H100_8B_PREFILL`). They are assumptions: only
ratios between blocks and between policies follow from them, never seconds of a given machine.
"""

from headrace.core.step_costs import H100_8B_PREFILL


def recompute_seconds(tokens: int, *, context_tokens: int) -> float:
    """Seconds that computing `tokens` after `context_tokens` adds to a prefill that is run anyway."""
    return prefill_seconds(tokens, context_tokens=context_tokens) - H100_8B_PREFILL.base_s if tokens else 0.0


def prefill_seconds(tokens: int, *, context_tokens: int) -> float:
    """Seconds of a prefill of its own; 0 when there is nothing to compute."""
    return float(H100_8B_PREFILL.seconds(context_tokens, context_tokens + tokens))
