"""Why a plan was chosen: the plans that were considered, each with its terms in seconds. For explanations only."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter

import numpy as np

from headrace.core.choose_placement import Floats, Ints
from headrace.core.generation import WorkerId


class PlanReason(StrEnum):
    """Why the decode worker was chosen: the `reason` label of routing counts."""

    ASKED = "asked"  # the request names it
    MATCH = "match"  # its plan costs least, and nobody has more of the prompt at hand
    SOONER = "sooner"  # its plan costs least, though another worker has more of the prompt at hand
    NO_MATCH = "no_match"  # its plan costs least, and nobody has any of the prompt at hand


class SettledBy(StrEnum):
    """What made the chosen plan win over the others."""

    ASKED = "asked"  # the request names its workers
    COST = "cost"  # by more than predictions are good for
    HELD = "held"  # costs as much as others; most of the prompt at hand
    NEAR = "near"  # ... as much of it at hand; no network between the workers
    LOAD = "load"  # ... fewer sequences
    HASH = "hash"  # ... equal in all that counts: by the rendezvous hash


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """One plan that was considered. Tokens of the prompt sum up; seconds are predictions."""

    prefill_worker: WorkerId | None  # None: the decode worker computes the prompt
    decode_worker: WorkerId
    device_tokens: int  # in the pool of the worker that computes
    loaded_tokens: int  # fetched by it from store nodes
    computed_tokens: int
    wait_s: float  # until prompts before it are computed
    fetch_s: float  # meanwhile
    compute_s: float
    hand_off_s: float  # until the decode worker has what was computed, and the first token
    price_s: float  # what the work costs others: while no worker is free, and prompts that it passes
    interference_s: float  # ... and what it takes from decodes beside it
    decode_s: float  # the first output tokens
    memory_s: float  # until a running sequence ends and leaves room
    ttft_s: float
    cost_s: float
    barred: str = ""  # not empty: why the plan could not be chosen whatever it costs


@dataclass(frozen=True, slots=True, eq=False)
class PlanColumns:
    """Some plans side by side: each field of `PlanTerms` as an array of [plans]. Most decisions are never explained:
    to spell out the plans that were not chosen would cost as much as choosing."""

    prefill_worker: Sequence[WorkerId | None]
    decode_worker: Sequence[WorkerId]
    device_tokens: Ints
    loaded_tokens: Ints
    computed_tokens: Ints
    wait_s: Floats
    fetch_s: Floats
    compute_s: Floats
    hand_off_s: Floats
    price_s: Floats
    interference_s: Floats
    decode_s: Floats
    memory_s: Floats
    ttft_s: Floats
    cost_s: Floats
    barred: Sequence[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanColumns) and self.terms() == other.terms()

    __hash__ = None  # type: ignore[assignment]

    def terms(self) -> tuple[PlanTerms, ...]:
        """One after the other."""
        plain = [column.tolist() if isinstance(column, np.ndarray) else column for column in _columns_of(self)]
        return tuple(PlanTerms(*values) for values in zip(*plain, strict=True))

    def first(self) -> PlanTerms:
        """The first one alone."""
        firsts = [column[0] for column in _columns_of(self)]
        return PlanTerms(*(first.item() if isinstance(first, np.generic) else first for first in firsts))


_columns_of = attrgetter(*(field.name for field in fields(PlanTerms)))


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """One decision."""

    prompt_tokens: int
    plans: PlanColumns  # the chosen one first, then the next best, least cost first, barred ones among them
    chosen: PlanTerms
    num_considered: int
    settled_by: SettledBy
    price: float  # seconds of answer that a second of GPU is worth now

    @property
    def others(self) -> tuple[PlanTerms, ...]:
        """The next best plans, least cost first, barred ones among them."""
        return self.plans.terms()[1:]

    @property
    def least_compute_s(self) -> float:
        """The least work of all plans that were not barred."""
        return float(min(s for s, why in zip(self.plans.compute_s.tolist(), self.plans.barred, strict=True) if not why))
