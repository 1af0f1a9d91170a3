"""Choosing a token: exact filters, a draw that repeats, and the distribution that was asked for."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.generation import SamplingParams
from headrace.engine.sample_token import (
    LogitsInvalid,
    filter_candidates,
    log_softmax,
    position_at,
    sample_token,
    uniform,
)

NO_NUMBER = float("nan")


def make_logits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def make_params(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "temperature": 1.0} | changes))  # type: ignore[arg-type]


def kept_ids(logits: np.ndarray, **changes: object) -> set[int]:
    ids, weights = filter_candidates(logits.astype(np.float64), make_params(**changes))
    assert len(ids) == len(weights)
    return {int(i) for i in ids}


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    greedy = make_params(temperature=0.0)
    assert sample_token(make_logits(1, 5, 2, 5), greedy, index=0).token_id == 1
    assert sample_token(make_logits(7, 7), greedy, index=3).token_id == 0


def test_top_k_keeps_k_tokens_and_the_lower_id_at_a_tie() -> None:
    assert kept_ids(make_logits(1, 3, 2, 2, 0), top_k=2) == {1, 2}
    assert kept_ids(make_logits(1, 3, 2), top_k=1) == {1}
    assert kept_ids(make_logits(1, 3, 2), top_k=0) == {0, 1, 2}
    assert kept_ids(make_logits(1, 3, 2), top_k=9) == {0, 1, 2}


def test_top_p_keeps_the_fewest_tokens_that_reach_p() -> None:
    halves = np.log(make_logits(0.125, 0.5, 0.25, 0.125))
    assert kept_ids(halves, top_p=0.49) == {1}
    assert kept_ids(halves, top_p=0.6) == {1, 2}
    assert kept_ids(halves, top_p=0.8) == {0, 1, 2}
    assert kept_ids(halves, top_p=1.0) == {0, 1, 2, 3}
    assert kept_ids(halves, top_p=0.0) == {1}, "the most likely token always stays"


def test_top_p_counts_within_what_top_k_left() -> None:
    logits = np.log(make_logits(0.4, 0.3, 0.2, 0.1))
    assert kept_ids(logits, top_k=2, top_p=0.56) == {0}  # 0.4 / 0.7 = 0.571 of what is left
    assert kept_ids(logits, top_p=0.56) == {0, 1}


def test_top_p_is_taken_after_the_temperature() -> None:
    logits = np.log(make_logits(0.5, 0.3, 0.2))
    assert kept_ids(logits, top_p=0.6) == {0, 1}
    assert kept_ids(logits, top_p=0.6, temperature=0.25) == {0}  # 0.5^4 is 0.87 of the sum of fourth powers


@given(st.integers(1, 5_000), st.floats(0.01, 0.999), st.integers(0, 2**32))
def test_top_p_by_candidates_is_top_p_by_sorting_all(vocab: int, top_p: float, seed: int) -> None:
    """The oracle sorts the whole vocabulary; flat rows need more than the first candidates, and have many ties."""
    row = np.random.default_rng(seed).integers(0, 4, vocab).astype(np.float64)
    order = np.argsort(-row, kind="stable")
    weights = np.exp(row - row.max())
    count = int(weights[order].cumsum().searchsorted(top_p * weights.sum())) + 1
    ids, _ = filter_candidates(row, make_params(top_p=top_p))
    assert abs(len(ids) - count) <= 1  # sums in another order may differ in the last bit
    assert list(ids) == list(order[: len(ids)])


def test_an_impossible_token_is_never_drawn() -> None:
    logits = make_logits(-math.inf, 0.0, -math.inf, 0.0, -math.inf)
    drawn = {sample_token(logits, make_params(seed=seed), index=0).token_id for seed in range(200)}
    assert drawn == {1, 3}


def test_the_ends_of_the_unit_interval_fall_on_weights_that_are_not_zero() -> None:
    """Fails if the number 0 draws a leading impossible token, or a number next to 1 one behind the last."""
    weights = np.array([0.0, 0.1, 0.7, 0.0])
    assert position_at(weights, 0.0) == 1
    assert position_at(weights, 1.0) == 2
    assert position_at(weights, np.nextafter(1.0, 0.0)) == 2


def test_a_draw_repeats_for_its_seed_and_index_and_differs_for_others() -> None:
    logits = np.zeros(50_000, dtype=np.float32)

    def draws(seed: int) -> list[int]:
        return [sample_token(logits, make_params(seed=seed), index=index).token_id for index in range(20)]

    assert draws(7) == draws(7)
    assert len(set(draws(7))) == 20
    assert not set(draws(7)) & set(draws(8))


def test_the_draw_for_a_seed_and_index_is_fixed_for_all_time() -> None:
    """A retry may run on a worker of another version: changing these numbers changes users' answers."""
    assert [uniform(0, 0), uniform(42, 17), uniform(-1, 3)] == [
        0.011546754286331562,
        0.4439797563407103,
        0.8918334340153565,
    ]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1


def test_uniform_numbers_fill_the_unit_interval_evenly_along_seeds_and_along_indices() -> None:
    """Chi-square over 20 bins, 19 degrees of freedom: 43.8 is passed with probability 0.999."""
    for numbers in ([uniform(seed, 0) for seed in range(4_000)], [uniform(3, index) for index in range(4_000)]):
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert ((counts - 200) ** 2 / 200).sum() < 43.8


def test_samples_follow_the_softmax_of_the_scaled_logits() -> None:
    """Chi-square of 4,000 draws against the exact distribution at temperature 0.7, 4 degrees of freedom, p = 0.999."""
    logits = make_logits(0.3, -1.0, 1.2, 0.0, 0.9)
    weights = np.exp(logits.astype(np.float64) / 0.7)
    expected = 4_000 * weights / weights.sum()
    params = [make_params(temperature=0.7, seed=seed) for seed in range(40)]
    drawn = [sample_token(logits, p, index=index).token_id for p in params for index in range(100)]
    counts = np.bincount(drawn, minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.01])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits(1, 4, 3.5)
    assert sample_token(logits, make_params(temperature=temperature, seed=5), index=1).token_id == 1


def test_log_probabilities_are_those_of_the_unscaled_row() -> None:
    """Not of the row after temperature and filters, which would make the chosen token look certain."""
    logits = make_logits(1.0, 2.0, 0.5, 2.0)
    sampled = sample_token(logits, make_params(temperature=0.5, top_k=1, logprobs=3), index=0)
    exact = [value - math.log(sum(math.exp(v) for v in logits)) for value in logits]
    assert sampled.token_id == 1
    assert sampled.logprob == pytest.approx(exact[1], abs=1e-12)
    assert [token_id for token_id, _ in sampled.top] == [1, 3, 0]
    assert [logprob for _, logprob in sampled.top] == pytest.approx([exact[1], exact[3], exact[0]], abs=1e-12)


def test_log_probabilities_without_alternatives_and_none_at_all() -> None:
    logits = make_logits(1.0, 2.0)
    assert sample_token(logits, make_params(temperature=0.0, logprobs=0), index=0).top == ()
    assert sample_token(logits, make_params(temperature=0.0, logprobs=0), index=0).logprob is not None
    assert sample_token(logits, make_params(temperature=0.0), index=0).logprob is None


def test_log_softmax_stands_large_logits() -> None:
    assert np.exp(log_softmax(np.array([3e38, 0.0, 3e38]))).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [NO_NUMBER, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(LogitsInvalid):
            sample_token(make_logits(0.0, bad, 1.0), make_params(temperature=temperature), index=0)
    with pytest.raises(LogitsInvalid):
        sample_token(make_logits(-math.inf, -math.inf), make_params(), index=0)
