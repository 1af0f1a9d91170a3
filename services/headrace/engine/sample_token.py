"""Choosing the next token from one row of logits.

This file owns greedy choice, the temperature, top-k and top-p filters, the seeded draw and log-probabilities. It knows
nothing of sequences, batches or text. Everything is computed from the row alone in float64, so the choice does not
depend on what else is in the batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.core.generation import SamplingParams

Logits = npt.NDArray[np.float32]  # [vocab]
Row = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Candidates tried before a whole vocabulary is sorted for top-p: nearly always enough, and 50 times cheaper.
_TOP_P_CANDIDATES = 1_024


class LogitsInvalid(ValueError):
    """The model's logits hold no number to choose by (NaN, or nothing but -inf)."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The chosen token, its log-probability and the best alternatives (id, log-probability), best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample_token(logits: Logits, params: SamplingParams, *, index: int) -> SampledToken:
    """Choose output token number `index` (0-based) of a sequence.

    logits: [vocab] float32. Temperature 0 is greedy, ties go to the lowest id. Otherwise the row is divided by the
    temperature, cut to the top-k and then to the smallest set whose probability reaches top-p, and one token is drawn.
    The draw depends on (params.seed, index) and on the row only: a retry, or another batch, repeats it.
    Log-probabilities are those of the unscaled, unfiltered row. Raises LogitsInvalid.
    """
    assert logits.ndim == 1
    best = int(logits.argmax())  # numpy's argmax is the first of equals; NaN counts as largest
    if not np.isfinite(logits[best]):
        raise LogitsInvalid(f"the largest of {logits.size} logits is {logits[best]}")
    if params.temperature == 0 and params.logprobs is None:
        return SampledToken(token_id=best)
    row = logits.astype(np.float64)  # [vocab]
    if params.temperature == 0:
        token_id = best
    else:
        candidates, weights = filter_candidates(row, params)
        token_id = int(candidates[position_at(weights, uniform(params.seed, index))])
    if params.logprobs is None:
        return SampledToken(token_id=token_id)
    logprobs = log_softmax(row)
    top = _best_ids(logprobs, params.logprobs)
    return SampledToken(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        top=tuple((int(i), float(logprobs[i])) for i in top),
    )


def filter_candidates(row: Row, params: SamplingParams) -> tuple[Ids, Row]:
    """Ids that may be drawn, and their weights relative to the most likely one (not normalised).

    Equal logits at the edge of top-k or top-p: the lower id stays. The most likely token always stays.
    """
    assert params.temperature > 0
    weights = np.exp((row - row.max()) / params.temperature)  # [vocab], in [0, 1]
    ids: Ids = np.arange(row.size)
    if 0 < params.top_k < row.size:
        ids = _best_ids(row, params.top_k)
    if params.top_p < 1:
        ids = _nucleus(row, weights, ids, params.top_p)
    return ids, weights[ids]


def uniform(seed: int, index: int) -> float:
    """The index-th number of the seed's sequence, uniform in [0, 1): one block of the Philox4x64 counter generator."""
    raw = np.random.Philox(key=seed % 2**128, counter=[index, 0, 0, 0]).random_raw()
    return float(raw >> 11) * 2.0**-53


def log_softmax(row: Row) -> Row:
    """Log-probabilities of a row: [vocab]."""
    shifted = row - row.max()
    result: Row = shifted - np.log(np.exp(shifted).sum())
    return result


def position_at(weights: Row, at: float) -> int:
    """Position of the weight in which the point `at` (in [0, 1)) of their total falls; never one of weight 0."""
    cumulative = weights.cumsum()
    position = int(cumulative.searchsorted(at * cumulative[-1], side="right"))
    # at * total may round up to the total itself, which lies behind the last weight.
    return min(position, int(weights.nonzero()[0][-1]))


def _best_ids(row: Row, count: int) -> Ids:
    """Ids of the `count` largest entries, largest first, equal ones by lowest id."""
    if count == 0:
        return np.arange(0)
    if count < row.size:
        edge = np.partition(row, row.size - count)[row.size - count]
        ids: Ids = (row >= edge).nonzero()[0]  # all that tie with the edge are in, so the order decides between them
    else:
        ids = np.arange(row.size)
    best: Ids = ids[np.argsort(-row[ids], kind="stable")][:count]
    return best


def _nucleus(row: Row, weights: Row, ids: Ids, top_p: float) -> Ids:
    """The fewest of `ids`, most likely first, whose share of the weight of `ids` reaches `top_p`; one at least."""
    needed = top_p * weights[ids].sum()
    for count in (_TOP_P_CANDIDATES, ids.size):
        best = ids[_best_ids(row[ids], min(count, ids.size))]
        cumulative = weights[best].cumsum()
        if cumulative[-1] >= needed or count >= ids.size:
            break
    return best[: int(cumulative.searchsorted(needed, side="left")) + 1]
