"""Drafts are as long as they pay, and not at all where they do not."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.choose_draft_lengths import DraftCandidate, DraftPrices, choose_draft_lengths

FREE_ROWS = DraftPrices(token_s=0.03, row_s=0.0, draft_token_s=0.0, row_multiple=1, num_rows=1)


def test_where_rows_cost_nothing_a_draft_is_as_long_as_it_may_be() -> None:
    assert choose_draft_lengths([DraftCandidate(0.9, 7)], FREE_ROWS) == [7]


def test_a_draft_ends_where_a_token_is_worth_less_than_its_row() -> None:
    """0.5 ** 3 = 0.125 of 30 ms are 3.75 ms, 0.5 ** 4 of it 1.9 ms; a row costs 2 ms."""
    assert choose_draft_lengths([DraftCandidate(0.5, 7)], replace(FREE_ROWS, row_s=0.002)) == [3]
    assert choose_draft_lengths([DraftCandidate(0.5, 7)], replace(FREE_ROWS, row_s=0.02)) == [0]


def test_the_time_to_make_a_draft_counts_too() -> None:
    prices = replace(FREE_ROWS, draft_token_s=0.005)
    assert choose_draft_lengths([DraftCandidate(0.5, 7)], prices) == [2]
    assert choose_draft_lengths([DraftCandidate(0.5, 7)], replace(prices, draft_token_s=0.016)) == [0]


def test_rows_that_fill_the_padding_up_cost_nothing() -> None:
    """Five rows are padded to eight: three drafts are free, likeliest first, however much a row costs."""
    prices = DraftPrices(token_s=0.01, row_s=1.0, draft_token_s=0.0, row_multiple=4, num_rows=5)
    candidates = [DraftCandidate(0.3, 4), DraftCandidate(0.6, 4), DraftCandidate(0.02, 4)]
    assert choose_draft_lengths(candidates, prices) == [1, 2, 0]


def test_a_group_of_rows_is_taken_whole_or_not_at_all() -> None:
    """Three free rows, then four for 8 ms: at 30 ms a token the next four are worth 0.9 ** 4 + ... = 2.3 tokens."""
    prices = DraftPrices(token_s=0.03, row_s=0.002, draft_token_s=0.0, row_multiple=4, num_rows=1)
    assert choose_draft_lengths([DraftCandidate(0.9, 7)], prices) == [7]
    assert choose_draft_lengths([DraftCandidate(0.9, 7)], replace(prices, row_s=0.02)) == [3]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), max_size=9),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.integers(1, 8),
)
def test_no_length_is_beyond_what_may_be_and_dearer_rows_never_make_drafts_longer(
    sequences: list[tuple[float, int]], token_s: float, row_s: float, draft_s: float, multiple: int
) -> None:
    candidates = [DraftCandidate(probability, most) for probability, most in sequences]
    prices = DraftPrices(token_s, row_s, draft_s, multiple, max(1, len(sequences)))
    lengths = choose_draft_lengths(candidates, prices)
    assert len(lengths) == len(candidates)
    assert all(0 <= length <= candidate.most for length, candidate in zip(lengths, candidates, strict=True))
    dearer = choose_draft_lengths(candidates, replace(prices, row_s=2 * row_s + 0.001))
    assert all(length <= before for length, before in zip(dearer, lengths, strict=True))
