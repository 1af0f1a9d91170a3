"""Constants of `step_costs.py` learned from what was observed: for prefill, for decode, for the way to a store node.

Each fit is weighted least squares of relative errors, where older observations count less, the coefficients are never
negative, and a prior fills in what the observations say nothing about. The prior's *shape* is what is assumed; how fast
this machine is in all is taken from the observations themselves, so ten steps of one kind already scale the rest.

An observation that took several times as long as expected (the step waited for the machine) counts as less than that;
when everything takes so long, the fit begins anew. Pure, without a clock.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from headrace.core.step_costs import DecodeCost, LinkCost, PrefillCost

# Until something is measured: between a small model on one CPU and a large one on a GPU, so that a new worker is
# neither flooded nor left idle for the second that it takes to know better.
PRIOR_PREFILL = PrefillCost(base_s=0.005, tokens_per_s=4_000.0, attention_s=2e-9)
PRIOR_DECODE = DecodeCost(base_s=0.010, sequence_s=0.5e-3, kv_token_s=100e-9)
PRIOR_DRAFT_ROW_S = 0.25e-3  # of the same sequence: its KV is read anyway
PRIOR_SHARED_MEMORY = LinkCost(bytes_per_s=4e9, round_trip_s=0.001)
PRIOR_GRPC = LinkCost(bytes_per_s=1e9, round_trip_s=0.002)

# Weight of all older observations after a new one: the last 100 steps count, the last 30 transfers.
STEP_MEMORY = 0.99
LINK_MEMORY = 0.97

# The prior weighs as much as this part of an observation: enough to settle what no observation tells, and no more.
PRIOR_WEIGHT = 0.002

# Smallest share of the largest moment that the prior adds to each: floats have 16 digits.
CONDITION_MIN = 1e-9

# From this many observations on an outlier is cut to this many times what was expected (or that part of it). So many
# outliers on one side in a row are no outliers: the machine has changed, and what was seen before is forgotten.
CUT_FROM = 5.0
CUT_RATIO = 3.0
OUTLIERS_MAX = 8

# No rate is told as higher than this: coefficients of 0 have no inverse.
RATE_MAX = 1e13


class PrefillFit:
    """A worker's `PrefillCost`, from steps that computed parts of prompts."""

    def __init__(self, prior: PrefillCost = PRIOR_PREFILL) -> None:
        self._fit = _Fit((prior.base_s, 1 / prior.tokens_per_s, prior.attention_s), memory=STEP_MEMORY)

    def add(self, stretches: Sequence[tuple[int, int]], seconds: float) -> None:
        """One step that computed `tokens` behind `context` others, for each (tokens, context)."""
        tokens = sum(tokens for tokens, _ in stretches)
        pairs = sum(tokens * (context + tokens / 2) for tokens, context in stretches)
        if tokens > 0:
            self._fit.add((1.0, float(tokens), pairs), seconds)

    def cost(self) -> PrefillCost:
        """As known now."""
        base_s, token_s, attention_s = self._fit.coefficients()
        return PrefillCost(base_s=base_s, tokens_per_s=_rate(token_s), attention_s=attention_s)


class DecodeFit:
    """A worker's `DecodeCost`, from steps that gave every sequence of the batch one token."""

    def __init__(self, prior: DecodeCost = PRIOR_DECODE, *, prior_draft_row_s: float = 0.0) -> None:
        """prior_draft_row_s: 0 where no step ever has rows of drafts."""
        self._has_drafts = prior_draft_row_s > 0
        drafts = (prior_draft_row_s,) if self._has_drafts else ()
        self._fit = _Fit((prior.base_s, prior.sequence_s, prior.kv_token_s, *drafts), memory=STEP_MEMORY)

    def add(self, sequences: int, kv_tokens: int, seconds: float, *, draft_rows: int = 0) -> None:
        """One step of a batch that read `kv_tokens` in all, and had `draft_rows` rows more than without drafts."""
        assert self._has_drafts or not draft_rows
        drafts = (float(draft_rows),) if self._has_drafts else ()
        if sequences > 0:
            self._fit.add((1.0, float(sequences), float(kv_tokens), *drafts), seconds)

    def cost(self) -> DecodeCost:
        """Of steps without drafts, as known now."""
        base_s, sequence_s, kv_token_s, *_ = self._fit.coefficients()
        return DecodeCost(base_s, sequence_s, kv_token_s)

    def draft_row_s(self) -> float:
        """What a row for a draft makes a step longer, as known now."""
        return self._fit.coefficients()[3] if self._has_drafts else 0.0


class LinkFit:
    """One way from a store node to a worker, from whole transfers."""

    def __init__(self, prior: LinkCost = PRIOR_GRPC) -> None:
        self._fit = _Fit((prior.round_trip_s, 1 / prior.bytes_per_s), memory=LINK_MEMORY)

    def add(self, num_bytes: int, seconds: float) -> None:
        """One transfer, from the wish to the bytes in place."""
        if num_bytes > 0:
            self._fit.add((1.0, float(num_bytes)), seconds)

    def cost(self) -> LinkCost:
        """As known now."""
        round_trip_s, byte_s = self._fit.coefficients()
        return LinkCost(bytes_per_s=_rate(byte_s), round_trip_s=round_trip_s)


class _Fit:
    """`seconds = sum(coefficient * feature)`, by the rules above. Features and priors are not negative."""

    def __init__(self, prior: tuple[float, ...], *, memory: float) -> None:
        assert all(value > 0 for value in prior)
        self._prior = prior
        self._memory = memory
        self._forget()

    def _forget(self) -> None:
        size = len(self._prior)
        self._weight = 0.0
        self._log_scale = 0.0  # weighted sum of log(seconds / what the prior says)
        self._moments = [[0.0] * size for _ in range(size)]  # of features over seconds
        self._sums = [0.0] * size
        self._outliers = 0  # in a row; below 0: shorter than expected
        self._solved: tuple[float, ...] | None = None

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        """Take one observation; what no clock can have measured is left out."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        seconds = self._cut(features, seconds)
        self._solved = None
        keep = self._memory
        self._weight = keep * self._weight + 1
        self._log_scale = keep * self._log_scale + math.log(seconds / _dot(self._prior, features))
        relative = [feature / seconds for feature in features]
        for row, a in enumerate(relative):
            self._sums[row] = keep * self._sums[row] + a
            for column, b in enumerate(relative):
                self._moments[row][column] = keep * self._moments[row][column] + a * b

    def _cut(self, features: tuple[float, ...], seconds: float) -> float:
        """What an observation counts as; the last of too many outliers in a row is the first of what is now normal."""
        if self._weight < CUT_FROM:
            return seconds
        expected = _dot(self.coefficients(), features)
        if expected <= 0:
            return seconds  # what is expected to cost nothing has not been seen yet, and bounds nothing
        side = (seconds > expected * CUT_RATIO) - (seconds < expected / CUT_RATIO)
        self._outliers = self._outliers + side if side * self._outliers >= 0 and side else side
        if abs(self._outliers) >= OUTLIERS_MAX:
            self._forget()
            return seconds
        return min(max(seconds, expected / CUT_RATIO), expected * CUT_RATIO)

    def coefficients(self) -> tuple[float, ...]:
        """As known now; solved once after each observation, however often it is asked for."""
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def _solve(self) -> tuple[float, ...]:
        """Least squares over coefficients >= 0, with the scaled prior as `PRIOR_WEIGHT` further observations."""
        if not self._weight:
            return self._prior
        scale = math.exp(self._log_scale / self._weight)
        units = [scale * value for value in self._prior]  # unknowns are near 1 in these: well conditioned
        matrix = [[self._moments[i][j] * units[i] * units[j] for j in range(len(units))] for i in range(len(units))]
        # Nearly parallel observations of very different size would leave nothing of the prior's weight in a float.
        prior_weight = max(PRIOR_WEIGHT, CONDITION_MIN * max(matrix[i][i] for i in range(len(units))))
        vector = [self._sums[i] * units[i] + prior_weight for i in range(len(units))]
        for i in range(len(units)):
            matrix[i][i] += prior_weight
        solution = _least_squares_not_negative(matrix, vector)
        return tuple(unit * value for unit, value in zip(units, solution, strict=True))


def _least_squares_not_negative(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The least of `x'Mx - 2v'x` over x >= 0, for a positive definite M of a few rows: the best of all choices
    of which unknowns are 0."""
    size = len(vector)
    best, best_value = [0.0] * size, 0.0
    for used in _subsets(size):
        solved = _solve([[matrix[i][j] for j in used] for i in used], [vector[i] for i in used])
        if min(solved) < 0:
            continue
        value = -sum(vector[i] * x for i, x in zip(used, solved, strict=True))  # of x'Mx - 2v'x where Mx = v
        if value < best_value:
            best, best_value = [0.0] * size, value
            for i, x in zip(used, solved, strict=True):
                best[i] = x
    return best


def _subsets(size: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, size + 1):
        yield from combinations(range(size), count)


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination of a positive definite matrix, which needs no pivoting."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _rate(seconds_each: float) -> float:
    return min(RATE_MAX, 1 / seconds_each) if seconds_each > 0 else RATE_MAX
