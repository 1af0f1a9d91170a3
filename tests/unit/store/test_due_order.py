"""The order in which times run out: as a sorted list would have it, in bounded memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.store.due_order import DueOrder

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "drop", "pop"]), st.integers(0, 5), st.integers(0, 30)), max_size=200
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_names_come_up_earliest_first_and_each_once(steps) -> None:
    """Against a plain dict; fails when an entry that was dropped or replaced comes up, or a later one hides it."""
    order: DueOrder[int] = DueOrder()
    model: dict[int, int] = {}
    for what, key, moment in steps:
        if what == "put":
            order.put(key, moment)
            model[key] = min(moment, model.get(key, moment))
        elif what == "drop":
            order.drop(key)
            model.pop(key, None)
        else:
            due = [at for at in model.values() if at <= moment]
            assert order.is_due(moment) >= bool(due)
            found = order.pop(moment)
            assert (found is None) == (not due)
            if found is not None:
                assert model.pop(found) == min(due)
        assert {each: order.moment_of(each) for each in model} == model
        order.check_integrity()


def test_orders_that_are_given_and_taken_back_all_day_take_no_memory() -> None:
    order: DueOrder[int] = DueOrder()
    for n in range(10_000):
        order.put(1, 10_000 - n)
        order.put(n, 20_000)
        order.drop(n)
        order.check_integrity()
