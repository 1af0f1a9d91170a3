"""Constants are found again from noisy observations, follow a change, and survive garbage."""

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.learned_costs import PRIOR_DECODE, PRIOR_GRPC, PRIOR_PREFILL, DecodeFit, LinkFit, PrefillFit
from headrace.core.step_costs import DecodeCost, LinkCost, PrefillCost

CPU = PrefillCost(base_s=0.030, tokens_per_s=600.0, attention_s=2e-7)
GPU = PrefillCost(base_s=0.004, tokens_per_s=30_000.0, attention_s=1e-9)
DECODE = DecodeCost(base_s=0.025, sequence_s=0.004, kv_token_s=2e-7)
LINK = LinkCost(bytes_per_s=3e8, round_trip_s=0.004)


def observe_prefill(fit: PrefillFit, true: PrefillCost, rng: random.Random, count: int, noise: float = 0.1) -> None:
    for _ in range(count):
        tokens, context = rng.choice([1, 16, 100, 512]), rng.randrange(0, 8_000)
        fit.add([(tokens, context)], float(true.seconds(context, context + tokens)) * rng.gauss(1, noise))


def worst_error(fit: PrefillFit, true: PrefillCost) -> float:
    """Largest relative error over stretches like those that are predicted."""
    learned = fit.cost()
    stretches = [(0, 512), (0, 4_000), (4_000, 4_512), (0, 50), (2_000, 2_100)]
    return max(abs(float(learned.seconds(*each)) / float(true.seconds(*each)) - 1) for each in stretches)


@pytest.mark.parametrize("true", [CPU, GPU])
def test_prefill_constants_are_recovered_from_noisy_steps(true):
    """Fails when a feature is wrong, or the prior outweighs what is seen."""
    fit = PrefillFit()
    observe_prefill(fit, true, random.Random(1), 200)
    assert worst_error(fit, true) < 0.12
    assert fit.cost().tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.2)


def test_a_step_of_several_chunks_counts_its_base_once():
    """Fails when the chunks of one step are taken for steps of their own."""
    fit, rng = PrefillFit(), random.Random(2)
    for _ in range(300):
        stretches = [(rng.choice([4, 32, 128]), rng.randrange(2_000)) for _ in range(rng.choice([1, 2, 5]))]
        work = sum(float(CPU.seconds(c, c + n)) - CPU.base_s for n, c in stretches)
        fit.add(stretches, (CPU.base_s + work) * rng.gauss(1, 0.05))
    assert fit.cost().base_s == pytest.approx(CPU.base_s, rel=0.15)


def test_decode_constants_are_recovered_from_noisy_steps():
    """Fails when sequences and KV tokens are mixed up."""
    fit, rng = DecodeFit(), random.Random(3)
    for _ in range(300):
        sequences = rng.randrange(1, 33)
        kv_tokens = sequences * rng.randrange(10, 6_000)
        fit.add(sequences, kv_tokens, DECODE.step_seconds(sequences, kv_tokens) * rng.gauss(1, 0.1))
    learned = fit.cost()
    for batch in [(1, 100), (8, 8_000), (32, 64_000)]:
        assert learned.step_seconds(*batch) == pytest.approx(DECODE.step_seconds(*batch), rel=0.1)
    assert learned.kv_token_s == pytest.approx(DECODE.kv_token_s, rel=0.3)


def test_a_links_rate_and_round_trip_are_recovered():
    """Fails when small transfers are taken for a slow link."""
    fit, rng = LinkFit(), random.Random(4)
    for _ in range(100):
        num_bytes = rng.choice([10_000, 1_000_000, 30_000_000])
        fit.add(num_bytes, LINK.seconds(num_bytes) * rng.gauss(1, 0.1))
    assert fit.cost().bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=0.15)
    assert fit.cost().round_trip_s == pytest.approx(LINK.round_trip_s, rel=0.2)


def test_until_something_is_seen_the_prior_holds():
    """Fails when a new worker is unusable."""
    assert PrefillFit().cost() == PRIOR_PREFILL
    assert DecodeFit().cost() == PRIOR_DECODE
    assert LinkFit().cost().bytes_per_s == pytest.approx(PRIOR_GRPC.bytes_per_s)


def test_one_kind_of_step_already_says_how_fast_the_machine_is():
    """Fails when what was not observed keeps the prior's speed, a hundred times too fast here."""
    fit = PrefillFit()
    slow = PrefillCost(PRIOR_PREFILL.base_s * 100, PRIOR_PREFILL.tokens_per_s / 100, PRIOR_PREFILL.attention_s * 100)
    for _ in range(20):
        fit.add([(512, 0)], float(slow.seconds(0, 512)))
    assert float(fit.cost().seconds(0, 4_000)) == pytest.approx(float(slow.seconds(0, 4_000)), rel=0.1)


@pytest.mark.parametrize(("before", "after"), [(CPU, GPU), (GPU, CPU)])
def test_a_changed_machine_is_followed(before, after):
    """Fails when old observations count for ever, or when cutting outliers hides the change."""
    fit, rng = PrefillFit(), random.Random(5)
    observe_prefill(fit, before, rng, 300)
    observe_prefill(fit, after, rng, 600)
    assert worst_error(fit, after) < 0.25


def test_steps_that_waited_for_the_machine_do_not_spoil_the_constants():
    """Fails when one step in ten that took fifty times as long moves the prediction with it."""
    fit, rng = PrefillFit(), random.Random(6)
    for number in range(400):
        tokens, context = rng.choice([1, 16, 100, 512]), rng.randrange(0, 4_000)
        seconds = float(CPU.seconds(context, context + tokens)) * rng.gauss(1, 0.05)
        fit.add([(tokens, context)], seconds * (50 if number % 10 == 9 else 1))
    assert worst_error(fit, CPU) < 0.25


def test_what_no_clock_measured_is_left_out():
    """Fails when a step of no or endless length, or of no tokens, counts."""
    fit = PrefillFit()
    observe_prefill(fit, CPU, random.Random(7), 100)
    before = fit.cost()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        fit.add([(10, 0)], seconds)
    fit.add([], 1.0)
    fit.add([(0, 100)], 1.0)
    assert fit.cost() == before


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 1_000_000), st.floats(1e-9, 1e6)), min_size=1, max_size=60
    )
)
@example(
    [
        (1, 0, 45.0),
        (1, 0, 278.0),
        (1, 0, 290.0),
        (1, 0, 617_866.0),
        (82_575, 91_451, 1.0),
        (1, 0, 289_353.0),
        (1, 0, 1.0),
    ]
)
def test_coefficients_are_finite_and_never_negative_whatever_was_seen(observations):
    """Fails when a solution of the unbounded problem is told, or when a sum overflows."""
    prefill, decode, link = PrefillFit(), DecodeFit(), LinkFit()
    for tokens, context, seconds in observations:
        prefill.add([(tokens, context)], seconds)
        decode.add(tokens, context, seconds)
        link.add(context, seconds)
    p, d, k = prefill.cost(), decode.cost(), link.cost()
    for value in (p.base_s, p.attention_s, d.base_s, d.sequence_s, d.kv_token_s, k.round_trip_s):
        assert math.isfinite(value)
        assert value >= 0
    for rate in (p.tokens_per_s, k.bytes_per_s):
        assert 0 < rate < math.inf
