"""What it costs to compute a prefix instead of reading it: the prefill model that eviction and simulations weigh with.

The constants are those of an 8B model on one H100-class GPU. They are assumptions: only ratios between blocks and
between policies follow from them, never seconds of a given machine.
"""

# Linear layers: 12,000 tokens a second.
PREFILL_TOKENS_PER_S = 12_000.0

# Attention: each new token looks at every token before it, 1.3 ns a pair.
PREFILL_S_PER_TOKEN_PAIR = 1.3e-9

# Per prefill step, whatever its length: launches and the scheduler.
PREFILL_STEP_S = 0.005


def recompute_seconds(tokens: int, *, context_tokens: int) -> float:
    """Seconds that computing `tokens` after `context_tokens` adds to a prefill that is run anyway."""
    pairs = tokens * (context_tokens + tokens / 2)
    return tokens / PREFILL_TOKENS_PER_S + PREFILL_S_PER_TOKEN_PAIR * pairs


def prefill_seconds(tokens: int, *, context_tokens: int) -> float:
    """Seconds of a prefill of its own; 0 when there is nothing to compute."""
    return PREFILL_STEP_S + recompute_seconds(tokens, context_tokens=context_tokens) if tokens else 0.0
