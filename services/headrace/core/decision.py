"""Why a plan was chosen: the plans that were considered, each with its terms in seconds. For explanations only."""

from dataclasses import dataclass
from enum import StrEnum

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
    price_s: float  # what the work costs others, while no worker is free
    interference_s: float  # ... and what it takes from decodes beside it
    decode_s: float  # the first output tokens
    memory_s: float  # until a running sequence ends and leaves room
    ttft_s: float
    cost_s: float
    barred: str = ""  # not empty: why the plan could not be chosen whatever it costs


# Terms that make up `cost_s`, by the name of the field. Of wait and fetch only the longer one counts.
COST_TERMS = ("compute_s", "hand_off_s", "price_s", "interference_s", "decode_s", "memory_s")


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """One decision. `others` are the next best plans, least cost first, barred ones among them."""

    prompt_tokens: int
    chosen: PlanTerms
    others: tuple[PlanTerms, ...]
    num_considered: int
    settled_by: SettledBy
    price: float  # seconds of answer that a second of GPU is worth now
