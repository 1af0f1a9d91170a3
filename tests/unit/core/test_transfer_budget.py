"""When computing overtakes a fetch: the promise for any course of a load, and that good loads are left alone."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.overtake_limits import OVERTAKE_SHARE
from headrace.core.step_costs import PrefillCost
from headrace.core.transfer_budget import TransferBudget

ROUND_TRIP_S = 0.02
SLOW = PrefillCost(base_s=0.01, tokens_per_s=1_000.0, attention_s=1e-7)


def make_budget(
    *, tokens: int = 10_000, first_token: int = 0, predicted_s: float = 0.5, prefill=SLOW
) -> TransferBudget:
    return TransferBudget(prefill, first_token, tokens - 1, tokens, predicted_s, ROUND_TRIP_S)


def is_over(budget: TransferBudget, *, seconds: float, loaded_tokens: int) -> bool:
    return budget.is_over(seconds=seconds, loaded_tokens=loaded_tokens, arrived_tokens=loaded_tokens)


@given(
    pauses_s=st.lists(st.floats(0, 30), min_size=1, max_size=60),
    predicted_s=st.floats(0, 100),
    rate=st.floats(50, 1e6),
    attention_s=st.floats(0, 1e-6),
)
def test_whatever_a_source_does_a_load_and_the_rest_take_no_longer_than_the_promise(
    pauses_s: list[float], predicted_s: float, rate: float, attention_s: float
):
    """Fails when a load goes on at a moment from which computing the rest would break the promise."""
    budget = make_budget(predicted_s=predicted_s, prefill=PrefillCost(0.005, rate, attention_s))
    cold_s = budget.prefill.seconds(0, 10_000)
    seconds = 0.0
    for number, pause_s in enumerate(pauses_s):
        loaded = number * 9_999 // len(pauses_s)
        for _ in range(50):
            if is_over(budget, seconds=seconds, loaded_tokens=loaded):
                return
            left_s = budget.prefill.seconds(loaded, 10_000)
            assert seconds + left_s <= (1 + OVERTAKE_SHARE) * cold_s + ROUND_TRIP_S + 1e-9
            seconds += pause_s / 50


def test_a_load_that_keeps_its_prediction_is_never_overtaken():
    """Fails when a fetch that is worth it is cut short."""
    budget = make_budget(predicted_s=2.0)
    for step in range(100):
        assert not is_over(budget, seconds=2.0 * step / 100 + 0.05, loaded_tokens=100 * step)


def test_a_late_load_goes_on_while_its_rest_comes_sooner_than_it_can_be_computed():
    """Fails when lateness alone ends a load that is still the better way."""
    budget = make_budget(predicted_s=0.1)
    assert not is_over(budget, seconds=2.0, loaded_tokens=5_000)
    assert is_over(budget, seconds=2.0, loaded_tokens=1_000)


def test_a_source_that_gives_nothing_is_left_after_the_allowance():
    """Fails when a silent source is waited for because nothing says how slow it is."""
    budget = make_budget(predicted_s=100.0)
    allowance_s = OVERTAKE_SHARE * SLOW.seconds(0, 10_000) + ROUND_TRIP_S
    assert not is_over(budget, seconds=allowance_s - 0.01, loaded_tokens=0)
    assert is_over(budget, seconds=allowance_s + 0.01, loaded_tokens=0)


def test_when_a_look_is_due_is_when_the_load_is_over():
    """Fails when the next look comes after the moment from which computing had to begin."""
    budget = make_budget(predicted_s=100.0)
    left_s = budget.left_s(seconds=0.1, loaded_tokens=100)
    assert not is_over(budget, seconds=0.1 + left_s - 1e-6, loaded_tokens=100)
    assert is_over(budget, seconds=0.1 + left_s + 1e-6, loaded_tokens=100)


def test_a_load_that_is_complete_is_not_over():
    """Fails when the last look takes back what has come."""
    assert not is_over(make_budget(), seconds=1_000.0, loaded_tokens=9_999)


@given(
    stretches=st.lists(st.tuples(st.integers(1, 2_000), st.floats(0, 3)), min_size=1, max_size=30),
    patience_s=st.floats(0.1, 10),
    attention_s=st.floats(0, 1e-6),
)
def test_a_budget_that_goes_on_from_stretch_to_stretch_keeps_one_promise_for_all_of_them(
    stretches: list[tuple[int, float]], patience_s: float, attention_s: float
):
    """Fails when each stretch may cost as much as if there had been none before it."""
    whole = make_budget(prefill=PrefillCost(0.005, 1_000.0, attention_s))
    cold_s, at, spent_s = whole.prefill.seconds(0, 10_000), 0, 0.0
    for tokens, seconds in stretches:
        rest = whole.of_the_rest(at, spent_s=spent_s, patience_s=patience_s)
        if at + tokens >= 9_999 or is_over(rest, seconds=seconds, loaded_tokens=0):
            return
        left_s = spent_s + seconds + whole.prefill.seconds(at, 10_000)
        assert left_s <= (1 + OVERTAKE_SHARE) * cold_s + patience_s + 1e-9
        at, spent_s = at + tokens, spent_s + seconds
