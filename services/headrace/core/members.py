"""Who is alive: the records that store nodes, workers and gateways announce under a TTL, and renew while they live.

A record is the truth about its owner for as long as it stands; everything said under an older incarnation is void.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from headrace import __version__
from headrace.core.block import CacheSource, HolderId, Namespace
from headrace.core.generation import WorkerId
from headrace.core.learned_costs import PRIOR_DECODE, PRIOR_PREFILL
from headrace.core.step_costs import DecodeCost, PrefillCost


class WorkerRole(StrEnum):
    """What a worker takes on. A worker of role BOTH serves prefill and decode calls."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """Whether prefill calls may be sent to it."""
        return self in (WorkerRole.PREFILL, WorkerRole.BOTH)

    @property
    def decodes(self) -> bool:
        """Whether decode calls may be sent to it."""
        return self in (WorkerRole.DECODE, WorkerRole.BOTH)


@dataclass(frozen=True, slots=True)
class StoreNodeRecord:
    """One store node: a host's arena and where to reach it."""

    node_id: str  # stable across restarts of the node's process
    incarnation: int  # new at each start; larger than any before
    host: str  # equal for processes that can map the same /dev/shm
    address: str  # gRPC target, "127.0.0.1:50070"
    arena_path: str  # file to map on the same host
    pid: int
    metrics_port: int = 0
    draining: bool = False  # takes no new blocks: publish elsewhere; what it holds can be read
    version: str = __version__  # of the software that runs there

    @property
    def holder_id(self) -> HolderId:
        """The node's name in the index."""
        return HolderId(f"node:{self.node_id}")


@dataclass(frozen=True, slots=True)
class LearnedCosts:
    """What work costs on one worker, by its own measurements; until there are some, what is assumed of any."""

    prefill_base_s: float
    prefill_tokens_per_s: float
    prefill_attention_s: float
    decode_base_s: float
    decode_sequence_s: float
    decode_kv_token_s: float

    @classmethod
    def of(cls, prefill: PrefillCost, decode: DecodeCost) -> "LearnedCosts":
        """The same constants as they are announced."""
        return cls(
            float(prefill.base_s),
            float(prefill.tokens_per_s),
            float(prefill.attention_s),
            float(decode.base_s),
            float(decode.sequence_s),
            float(decode.kv_token_s),
        )


ASSUMED_COSTS = LearnedCosts.of(PRIOR_PREFILL, PRIOR_DECODE)


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """How fast a worker got blocks from one store node in one way."""

    node_id: str
    via: CacheSource
    bytes_per_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker: what it serves, where it runs, how loaded it is."""

    worker_id: WorkerId
    incarnation: int
    role: WorkerRole
    host: str
    store_node: str
    model: str
    namespace: Namespace
    context_tokens_max: int
    pool_blocks: int
    pid: int
    model_path: str = ""  # directory with tokenizer.json, for gateways
    metrics_port: int = 0
    running: int = 0  # sequences in the batch
    waiting: int = 0  # sequences admitted to the queue, not yet in the batch
    free_blocks: int = 0  # of the pool, that a new sequence could take now
    kept_blocks: int = 0  # of the free ones, those that hold a block for reuse until they are taken
    version: str = __version__  # as of a store node
    unix_ms: int = 0  # its clock when it said this; 0: it did not say
    store_node_near: bool = True  # `store_node` is on its host: what is held there is read from shared memory
    queue_s: float = 0.0  # predicted seconds until all prompts that it has now are computed
    costs: LearnedCosts = ASSUMED_COSTS
    links: tuple[MeasuredLink, ...] = ()  # to store nodes that it has read from lately
    window_tokens: int = 0  # of its model's layers that have a window, how far they see; 0: none has one
    ray_cluster: str = ""  # where it runs, when several have one index: no gateway of another can call it

    @property
    def holder_id(self) -> HolderId:
        """The worker's name in the index (device tier)."""
        return HolderId(f"worker:{self.worker_id}")


@dataclass(frozen=True, slots=True)
class GatewayRecord:
    """One gateway: where others ask it what only it remembers. It holds no blocks."""

    gateway_id: str
    incarnation: int
    host: str
    address: str  # gRPC target of `GatewayPeer`
    pid: int
    metrics_port: int = 0
    version: str = __version__  # as of a store node

    @property
    def holder_id(self) -> HolderId:
        """Its name among the members."""
        return HolderId(f"gateway:{self.gateway_id}")


MemberRecord = StoreNodeRecord | WorkerRecord | GatewayRecord


class NumberedRuns(Mapping[HolderId, int]):
    """Runs of holders that have numbers, as a mirror of the index finds them; spelled by name only for whoever asks.
    Who knows the same holders by other numbers takes the arrays over (`WorkerColumns.held`)."""

    __slots__ = ("_by_name", "depths", "holders")

    def __init__(self, holders: tuple[HolderId | None, ...], depths: NDArray[np.int32]) -> None:
        """holders: by number, the same object for as long as nothing changes; None: nobody's.  depths: leading blocks,
        by number; 0 for nobody's and for those that have none. At most one number of a holder has more."""
        self.holders = holders
        self.depths = depths
        self._by_name: dict[HolderId, int] | None = None

    def __getitem__(self, holder: HolderId) -> int:
        return self._named()[holder]

    def __iter__(self) -> Iterator[HolderId]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self._named())

    def _named(self) -> dict[HolderId, int]:
        if self._by_name is None:
            numbers = np.flatnonzero(self.depths)
            named = zip(map(self.holders.__getitem__, numbers.tolist()), self.depths[numbers].tolist(), strict=True)
            self._by_name = {holder: depth for holder, depth in named if holder is not None}
        return self._by_name


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many leading blocks of a chain each live holder has, as the index believes. A hint, never a promise."""

    num_blocks_by_holder: Mapping[HolderId, int]

    @property
    def num_blocks(self) -> int:
        """The longest run any one holder has."""
        return max(self.num_blocks_by_holder.values(), default=0)

    def of(self, holder: HolderId) -> int:
        """Leading blocks that this holder has; 0 when it has none."""
        return self.num_blocks_by_holder.get(holder, 0)


NO_MATCH = PrefixMatch(num_blocks_by_holder={})
