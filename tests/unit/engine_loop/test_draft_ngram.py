"""What followed the last time: the index against a plain search over the whole sequence."""

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.draft_limits import NGRAM_INDEX_TOKENS_MAX, NGRAM_TOKENS_MAX
from headrace.core.generation import SamplingParams
from headrace.engine.draft_ngram import NGRAM_TOKENS_MIN, NgramDrafter, NgramIndex, draft_ngram
from headrace.engine.drafter import Draft, DraftWish


def search(token_ids: list[int], most: int) -> Draft:
    """The longest end that stood before, the latest of equally long ones, by trying all places."""
    for length in range(NGRAM_TOKENS_MAX, NGRAM_TOKENS_MIN - 1, -1):
        for place in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[place - length : place] == token_ids[len(token_ids) - length :]:
                draft = token_ids[place : place + most]
                while len(draft) < most:
                    draft.append(draft[len(draft) - (len(token_ids) - place)])
                return Draft(tuple(draft), kind=length)
    return Draft()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_a_growing_sequence_gets_the_draft_that_a_search_would_find(token_ids: list[int], most: int) -> None:
    """Few different tokens, so that nearly everything repeats. Fails when the index misses a place, keeps the wrong one
    or takes the end itself for an earlier occurrence. Up to 32 places are looked at, and here are no more."""
    index = NgramIndex()
    for end in range(1, min(len(token_ids), 33) + 1):
        assert draft_ngram(index, token_ids[:end], most) == search(token_ids[:end], most)


def test_a_quoted_passage_is_followed_to_its_end() -> None:
    passage = random.Random(1).sample(range(1_000), 50)
    index = NgramIndex()
    assert draft_ngram(index, [*passage, 5_000, *passage[:10]], 7) == Draft(tuple(passage[10:17]), kind=5)


def test_what_runs_in_a_circle_is_expected_to_go_on() -> None:
    assert draft_ngram(NgramIndex(), [7, 1, 2, 1, 2, 1, 2], 5) == Draft((1, 2, 1, 2, 1), kind=4)


def test_of_a_very_long_prompt_only_the_end_is_indexed() -> None:
    """Fails when the index grows without bound."""
    index, token_ids = NgramIndex(), list(range(3 * NGRAM_INDEX_TOKENS_MAX))
    assert draft_ngram(index, [*token_ids, 5, 6], 3) == Draft(), "too far back"
    assert draft_ngram(NgramIndex(), [*token_ids, len(token_ids) - 50, len(token_ids) - 49], 1).token_ids
    assert len(index._before) <= NGRAM_INDEX_TOKENS_MAX


def test_a_sequence_that_has_ended_leaves_nothing_behind() -> None:
    drafter = NgramDrafter()
    wish = DraftWish(3, [1, 2, 9, 1, 2], 5, SamplingParams(max_tokens=9), most=1)
    assert drafter.draft([wish]) == [Draft((9,), kind=2)]
    drafter.leave(3)
    drafter.leave(3)
    assert not drafter._indexes
