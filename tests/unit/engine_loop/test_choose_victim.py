"""Who gives way: the cheapest to bring back, and never the oldest while there is another."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.choose_victim import BlockHolder, choose_victim


def test_who_is_back_soonest_gives_way() -> None:
    holders = [BlockHolder(1, 4, 0.1), BlockHolder(2, 4, 0.3), BlockHolder(3, 4, 0.2), BlockHolder(4, 4, 0.5)]
    assert choose_victim(holders, num_missing=1) == 3


def test_seconds_count_for_each_missing_block_that_they_free() -> None:
    """Fails if two cheap ones are sent away where one that costs less than both would have been enough."""
    holders = [BlockHolder(1, 9, 9.0), BlockHolder(2, 1, 0.2), BlockHolder(3, 8, 0.5)]
    assert choose_victim(holders, num_missing=1) == 2
    assert choose_victim(holders, num_missing=4) == 3


def test_who_frees_nothing_is_left_alone_while_another_frees_something() -> None:
    holders = [BlockHolder(1, 3, 0.0), BlockHolder(2, 0, 0.0), BlockHolder(3, 1, 5.0)]
    assert choose_victim(holders, num_missing=1) == 3
    assert choose_victim(holders[:2], num_missing=1) == 2


def test_of_equals_the_newest_gives_way_and_the_only_one_does() -> None:
    assert choose_victim([BlockHolder(key, 2, 1.0) for key in (5, 7, 6)], num_missing=1) == 7
    assert choose_victim([BlockHolder(4, 2, 1.0)], num_missing=1) == 4


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(0, 10)).map(lambda pair: BlockHolder(0, *pair)), min_size=2, max_size=9
    ),
    st.integers(1, 5),
)
def test_the_oldest_always_gets_on(holders: list[BlockHolder], num_missing: int) -> None:
    numbered = [BlockHolder(key, holder.num_freed, holder.comeback_s) for key, holder in enumerate(holders)]
    assert choose_victim(numbered, num_missing=num_missing) != 0
