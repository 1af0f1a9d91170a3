"""What a load that stalls costs when it is cut, and what it would if computing raced it: the rule itself, no system.

    python benchmarks/race_or_cut.py

A prompt of 1,024 tokens takes `cold` seconds to compute. Its blocks come evenly within `load` of that, but for one
stall, which begins anywhere. `cut`: the load ends when `TransferBudget` says so, and the rest is computed. `race`: from
that moment on both go on, nothing slowed by the other, and the first to finish wins. `wait`: the load is never given
up. Mean first tokens over where the stall begins, and the worst cut, all in units of cold.
"""

from statistics import fmean

from headrace.core.step_costs import PrefillCost
from headrace.core.transfer_budget import TransferBudget

TOKENS, BLOCK_TOKENS, ROUND_TRIP_S = 1_024, 16, 0.01
BLOCKS = (TOKENS - 1) // BLOCK_TOKENS
PLACES = 20


def main() -> None:
    print(f"{'cold s':>6} {'load':>5} {'stall s':>7} {'cut':>6} {'race':>6} {'wait':>6} {'worst cut':>9}")
    for cold_s in (0.1, 1.0):
        for load_share in (0.1, 0.5):
            for stall_s in (0.0, 0.05, 0.2, 0.5, 1.0, 5.0):
                ways = [first_tokens(cold_s, load_share, stall_s, (place + 0.5) / PLACES) for place in range(PLACES)]
                cut, race, wait = (fmean(times) for times in zip(*ways, strict=True))
                worst = max(cut for cut, _, _ in ways)
                row = f"{cold_s:>6.1f} {load_share:>5.0%} {stall_s:>7.2f} {cut:>6.2f} {race:>6.2f} {wait:>6.2f}"
                print(f"{row} {worst:>9.2f}")


def first_tokens(cold_s: float, load_share: float, stall_s: float, stall_at: float) -> tuple[float, float, float]:
    """By cutting, racing and waiting, of cold; the stall begins after the share `stall_at` of the load."""
    cost = PrefillCost(base_s=0.0, tokens_per_s=TOKENS / cold_s, attention_s=0.0)
    load_s, block_tokens = load_share * cold_s, BLOCKS * BLOCK_TOKENS
    budget = TransferBudget(cost, 0, block_tokens, TOKENS, load_s, ROUND_TRIP_S)
    loaded_s = ROUND_TRIP_S + load_s + stall_s + float(cost.seconds(block_tokens, TOKENS))
    seconds = 0.0
    while seconds < ROUND_TRIP_S + load_s + stall_s:
        moving_s = max(0.0, seconds - ROUND_TRIP_S)
        moving_s = min(moving_s, max(stall_at * load_s, moving_s - stall_s))
        tokens = int(moving_s / load_s * BLOCKS + 1e-9) * BLOCK_TOKENS
        if budget.is_over(seconds=seconds, loaded_tokens=tokens, arrived_tokens=tokens):
            cut_s = seconds + float(cost.seconds(tokens, TOKENS))
            return cut_s / cold_s, min(cut_s, loaded_s) / cold_s, loaded_s / cold_s
        seconds += cold_s / 1_000
    return loaded_s / cold_s, loaded_s / cold_s, loaded_s / cold_s


if __name__ == "__main__":
    main()
