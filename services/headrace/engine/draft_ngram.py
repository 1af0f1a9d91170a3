"""Drafts without a model: what followed the last time that the same tokens stood in this sequence.

Answers that quote (code that is edited, documents that are summarised, JSON that is filled in) repeat long runs of
their prompt. The longest end of the sequence that occurred before, of NGRAM_TOKENS_MAX tokens down to
NGRAM_TOKENS_MIN, is looked up, and what stood behind it is proposed: prompt lookup decoding (A. Saxena, 2023; LLMA,
Yang et al., arXiv:2304.04487; `ngram` in vLLM, `prompt_lookup_num_tokens` in transformers). Those scan the sequence
once a step; here each sequence has an index that grows with it.

Owns the index. It knows nothing of models or of steps.
"""

from array import array
from collections.abc import Sequence

from headrace.core.draft_limits import NGRAM_INDEX_TOKENS_MAX, NGRAM_PLACES_MAX, NGRAM_TOKENS_MAX
from headrace.engine.drafter import Draft, DraftWish

NGRAM_TOKENS_MIN = 2  # one equal token says next to nothing about the next


def draft_ngram(index: "NgramIndex", token_ids: Sequence[int], most: int) -> Draft:
    """At most `most` tokens that stood behind the longest earlier occurrence of the sequence's end; the latest of
    equally long ones. The draft's kind is the number of tokens that agreed. Brings the index up to date first."""
    index.extend(token_ids)
    place, matched = 0, NGRAM_TOKENS_MIN - 1
    for candidate in index.places(token_ids):
        length = _match_length(token_ids, candidate)
        if length > matched:
            place, matched = candidate, length
            if matched == NGRAM_TOKENS_MAX:
                break
    if place == 0:
        return Draft()
    draft = list(token_ids[place : place + most])
    for position in range(most - len(draft)):  # the end is reached: what repeats itself is expected to go on doing so
        draft.append(draft[position])
    return Draft(tuple(draft), kind=matched)


class NgramIndex:
    """Where each pair of neighbouring tokens of one sequence stood, latest first; over NGRAM_INDEX_TOKENS_MAX tokens,
    of a longer prompt half as many of its last ones."""

    def __init__(self) -> None:
        self._first: int | None = None  # position of the first token that counts
        self._next = 0  # position behind the next pair to take in
        self._latest: dict[int, int] = {}  # pair -> position behind its latest occurrence
        self._before = array("q")  # [position - first - 2]: behind the occurrence before that one; 0 for none

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that are new, but for the last pair, which nothing follows yet."""
        if self._first is None:
            self._first = max(0, len(token_ids) - NGRAM_INDEX_TOKENS_MAX // 2)
            self._next = self._first + NGRAM_TOKENS_MIN
        for place in range(self._next, min(len(token_ids), self._first + NGRAM_INDEX_TOKENS_MAX)):
            pair = _pair(token_ids[place - 2], token_ids[place - 1])
            self._before.append(self._latest.get(pair, 0))
            self._latest[pair] = place
            self._next = place + 1

    def places(self, token_ids: Sequence[int]) -> list[int]:
        """Positions behind earlier occurrences of the sequence's last two tokens, latest first; a bounded number."""
        if self._first is None or len(token_ids) < NGRAM_TOKENS_MIN:
            return []
        place = self._latest.get(_pair(token_ids[-2], token_ids[-1]), 0)
        found: list[int] = []
        while place and len(found) < NGRAM_PLACES_MAX:
            found.append(place)
            place = self._before[place - self._first - NGRAM_TOKENS_MIN]
        return found


class NgramDrafter:
    """Looks up drafts for all sequences of an engine."""

    costs_steps = False

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """As Drafter. A few microseconds each, but for a sequence's first time: 0.3 ms for each thousand tokens."""
        return [
            draft_ngram(self._indexes.setdefault(wish.key, NgramIndex()), wish.token_ids, wish.most) for wish in wishes
        ]

    def token_s(self) -> float:
        """As Drafter."""
        return 0.0

    def leave(self, key: int) -> None:
        """As Drafter."""
        self._indexes.pop(key, None)


def _match_length(token_ids: Sequence[int], place: int) -> int:
    """How many tokens before `place` equal the last ones of the sequence; NGRAM_TOKENS_MAX at most."""
    length = 0
    for back in range(1, min(NGRAM_TOKENS_MAX, place) + 1):
        if token_ids[place - back] != token_ids[-back]:
            break
        length = back
    return length


def _pair(a: int, b: int) -> int:
    return a << 32 | b
