"""A cluster as its own workers describe it: the constants that they measured of themselves, as `ClusterModel`.

Owns how what each worker announced at several moments becomes one number: the mean of seconds (never of rates), since
costs add up and a slow moment must weigh as much as it cost. What nobody has measured yet is left as it is assumed of
any worker. Does not know where listings come from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.learned_costs import PRIOR_GRPC, PRIOR_SHARED_MEMORY
from headrace.core.members import ASSUMED_COSTS, LearnedCosts, MeasuredLink, WorkerRecord
from headrace.core.step_costs import DecodeCost, LinkCost, PrefillCost
from headrace.simulate.cluster_model import ClusterModel

# A way of which only tiny transfers were seen may have no rate: then it moves this much in a second.
LINK_RATE_MAX = 1e12


@dataclass(frozen=True, slots=True)
class FittedTo:
    """What workers do not announce."""

    name: str
    host_bytes: int  # of all store nodes together
    prefill_chunk_tokens: int
    local_prefill_tokens: int
    request_s: float  # from a caller to a worker and back, beside all work
    mean_context_tokens: float  # of a sequence that decodes: what a step beside a prefill reads for it
    ttft_slo_s: float
    itl_slo_s: float


def fit_cluster(listings: Sequence[Sequence[WorkerRecord]], given: FittedTo) -> ClusterModel:
    """The cluster that these listings of its live workers, oldest first, describe. The last says who there is.

    Without workers that only prefill, those that decode do both. Raises InvalidRequest when nobody was listed.
    """
    workers = listings[-1] if listings else ()
    if not workers:
        raise InvalidRequest("no worker was listed: is a system running?", param="listings")
    records = [record for listing in listings for record in listing]
    prefillers = sum(not worker.role.decodes for worker in workers)
    decoders = len(workers) - prefillers
    prefill, decode = _prefill_cost(records, given.prefill_chunk_tokens), _decode_cost(records)
    layout = workers[0].namespace.layout
    token_bytes = layout.block_bytes / layout.block_tokens
    beside_s = decode.sequence_s + decode.kv_token_s * given.mean_context_tokens
    chunk_s = float(prefill.seconds(0, given.prefill_chunk_tokens))
    return ClusterModel(
        name=given.name,
        prefill_workers=prefillers,
        decode_workers=decoders if prefillers else 0,
        mixed_workers=0 if prefillers else decoders,
        prefill=prefill,
        decode=decode,
        network=_link_cost(records, far=len({worker.store_node for worker in workers}) > 1),
        kv_token_bytes=round(token_bytes),
        device_tokens=round(median(worker.pool_blocks for worker in workers)) * layout.block_tokens,
        host_tokens=int(given.host_bytes / token_bytes / len(workers)),
        ttft_slo_s=given.ttft_slo_s,
        itl_slo_s=given.itl_slo_s,
        first_token_steps=0,
        prefills_make_way=True,
        request_s=given.request_s,
        prefill_chunk_tokens=given.prefill_chunk_tokens,
        interference=beside_s / chunk_s,
        local_prefill_tokens=given.local_prefill_tokens,
    )


def _prefill_cost(records: Iterable[WorkerRecord], chunk_tokens: int) -> PrefillCost:
    """A worker's base is that of one step of a prompt, a simulation's that of a whole prompt: each further step's goes
    to its tokens. A prompt of n tokens takes n / chunk_tokens steps and half a one more, on average."""
    measured = _measured(records, lambda costs: (costs.prefill_base_s, costs.prefill_tokens_per_s))
    base_s = fmean(record.costs.prefill_base_s for record in measured)
    token_s = fmean(1 / record.costs.prefill_tokens_per_s for record in measured) + base_s / chunk_tokens
    return PrefillCost(base_s / 2, 1 / token_s, fmean(record.costs.prefill_attention_s for record in measured))


def _decode_cost(records: Iterable[WorkerRecord]) -> DecodeCost:
    measured = _measured(records, lambda costs: (costs.decode_base_s, costs.decode_sequence_s))
    return DecodeCost(
        base_s=fmean(record.costs.decode_base_s for record in measured),
        sequence_s=fmean(record.costs.decode_sequence_s for record in measured),
        kv_token_s=fmean(record.costs.decode_kv_token_s for record in measured),
    )


def _measured(
    records: Iterable[WorkerRecord], part: Callable[[LearnedCosts], tuple[float, float]]
) -> list[WorkerRecord]:
    """Those of which this part of the costs is not what is assumed of any; all, when there are none."""
    every = list(records)
    return [record for record in every if part(record.costs) != part(ASSUMED_COSTS)] or every


def _link_cost(records: Iterable[WorkerRecord], *, far: bool) -> LinkCost:
    """The ways to store nodes that workers used: over gRPC where there are several, else through shared memory."""
    via = CacheSource.GRPC if far else CacheSource.SHARED_MEMORY
    links: list[MeasuredLink] = [link for record in records for link in record.links if link.via is via]
    if not links:
        return PRIOR_GRPC if far else PRIOR_SHARED_MEMORY
    byte_s = max(1 / LINK_RATE_MAX, fmean(1 / link.bytes_per_s for link in links))
    return LinkCost(1 / byte_s, fmean(link.round_trip_s for link in links))
