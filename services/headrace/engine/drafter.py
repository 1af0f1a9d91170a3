"""What a drafter is: whoever proposes how a sequence might go on. What becomes of a draft is `speculation.py`'s.

A draft is a guess. It may be wrong, short or empty; nothing but speed depends on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.core.generation import SamplingParams

OFF, NGRAM = "off", "ngram"  # what `speculation` may be besides a model


@dataclass(frozen=True, slots=True)
class DraftWish:
    """A sequence that could use a draft. `token_ids` is its own list, to be read and not kept."""

    key: int
    token_ids: Sequence[int]  # all that are known: prompt and output, the newest last
    num_prompt: int
    sampling: SamplingParams
    most: int  # tokens of a draft, at least 1

    def up_to(self, most: int) -> "DraftWish":
        """The same for a draft of so many tokens."""
        return replace(self, most=most)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that might follow. Drafts of one `kind` are expected to be right about equally often."""

    token_ids: tuple[int, ...] = ()
    kind: int = 0


@dataclass(slots=True)
class DraftCheck:
    """A draft's computed tokens against what is chosen in their places, up to the first difference."""

    token_ids: tuple[int, ...] = ()
    kind: int = 0  # as of the draft
    tested: int = 0
    accepted: int = 0

    def compare(self, chosen: int) -> bool:
        """Whether the next place has the draft's token; False where there is none, or one before was wrong."""
        if self.accepted < self.tested or self.tested == len(self.token_ids):
            return False
        right = self.token_ids[self.tested] == chosen
        self.tested += 1
        self.accepted += right
        return right


class Drafter(Protocol):
    """Proposes drafts for the sequences of one engine, in its step thread."""

    costs_steps: bool  # whether a draft takes time worth counting: then it is asked for only when it is to be used

    def token_s(self) -> float:
        """What a token of a draft took lately, without what was read before the first one; 0 when not known."""
        ...

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """A draft for each wish, in order, none longer than its `most`; an empty one where it has no idea."""
        ...

    def leave(self, key: int) -> None:
        """The sequence has ended. Idempotent; also for keys that never came."""
        ...
