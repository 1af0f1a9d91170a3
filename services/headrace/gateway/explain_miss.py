"""Say why a prompt's blocks are not (all) in the cache, from what holders, the index and live workers tell. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.block import Chain, Namespace, NamespaceId


class MissKind(StrEnum):
    """Why. The first that fits is told first; several can be true at once."""

    AS_SERVED = "as_served"
    HIT = "hit"
    TOO_SHORT = "too_short"
    EVICTED = "evicted"
    INDEX_DIFFERS = "index_differs"
    INDEX_AWAY = "index_away"
    HOLDER_GONE = "holder_gone"
    OTHER_NAMESPACE = "other_namespace"
    NEVER_STORED = "never_stored"


@dataclass(frozen=True, slots=True)
class MissReason:
    """One reason, and the blocks that it is about."""

    kind: MissKind
    detail: str
    holder: str = ""
    first_block: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RemovedBlock:
    """A block of the chain that a holder remembers to have lost."""

    position: int
    reason: str
    ago_s: float


@dataclass(frozen=True, slots=True)
class HolderAnswer:
    """One holder's word: how many leading blocks it has, what it remembers to have lost, and for how long it does."""

    held_blocks: int
    removed: tuple[RemovedBlock, ...] = ()
    remembers_s: float | None = None  # None: it remembers nothing (a worker)


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that is explained after it was served: what it missed, it has stored since."""

    cached_tokens: int
    ago_s: float  # it came


@dataclass(frozen=True, slots=True)
class MissEvidence:
    """Everything that is known about one prompt's blocks."""

    chain: Chain
    num_tokens: int
    namespace: Namespace  # the model's own, before a trust group or salt narrowed it
    answers: Mapping[str, HolderAnswer]
    indexed: Mapping[str, int] | None  # leading blocks of each holder as the index says; None: it is away
    gone_s: Mapping[str, float]  # holders that were there, and how long ago
    elsewhere: Mapping[NamespaceId, NamespaceId]  # other namespaces with the first missing tokens, to their base
    live: Sequence[Namespace]  # of live workers
    served: ServedRequest | None = None


def explain_miss(evidence: MissEvidence) -> list[MissReason]:
    """Reasons as of now, most telling first; exactly one when all of it is there or it is too short. Of a request that
    was served, what is known of that moment comes before them."""
    return [*_as_served(evidence), *_as_of_now(evidence)]


def _as_served(evidence: MissEvidence) -> Iterator[MissReason]:
    """What was cached when the request came, and which of the blocks that it missed had left before."""
    served = evidence.served
    if served is None or not evidence.chain:
        return
    told = f"when it came, {served.ago_s:.0f} s ago, {served.cached_tokens} of {evidence.num_tokens} tokens were cached"
    yield MissReason(MissKind.AS_SERVED, f"{told}; what follows is as of now")
    cached_blocks = served.cached_tokens // evidence.namespace.layout.block_tokens
    here_again = range(cached_blocks, _best(evidence))
    for holder, answer in evidence.answers.items():
        for run in _runs(
            [each for each in answer.removed if each.position in here_again and each.ago_s > served.ago_s]
        ):
            before_s = min(each.ago_s for each in run) - served.ago_s
            detail = f"{run[0].reason}, {before_s:.0f} s before it came; stored again since"
            yield MissReason(MissKind.EVICTED, detail, holder, run[0].position, len(run))


def _best(evidence: MissEvidence) -> int:
    """Leading blocks that somebody has."""
    return max((answer.held_blocks for answer in evidence.answers.values()), default=0)


def _as_of_now(evidence: MissEvidence) -> list[MissReason]:
    block_tokens = evidence.namespace.layout.block_tokens
    if not evidence.chain:
        tokens = f"{evidence.num_tokens} tokens are less than one block of {block_tokens}; only full blocks are kept"
        return [MissReason(MissKind.TOO_SHORT, tokens)]
    best = _best(evidence)
    missing = len(evidence.chain) - best
    found = [*_index_reasons(evidence)]
    if missing == 0:
        whole = MissReason(MissKind.HIT, "every full block is there", first_block=0, num_blocks=best)
        return [whole, *found]
    evicted = [*_evicted(evidence, best)]
    found = [*evicted, *found, *_gone(evidence, best), *_elsewhere(evidence, best)]
    named = {position for reason in evicted for position in range(reason.first_block, best + missing)}
    if best not in named:
        found.append(MissReason(MissKind.NEVER_STORED, _never(evidence), first_block=best, num_blocks=missing))
    return found


def _evicted(evidence: MissEvidence, best: int) -> Iterator[MissReason]:
    """Removals of what is missing now, one reason for each run of blocks that left a holder for the same cause."""
    for holder, answer in evidence.answers.items():
        for run in _runs([each for each in answer.removed if each.position >= best]):
            detail = f"{run[0].reason}, {min(each.ago_s for each in run):.0f} s ago"
            yield MissReason(MissKind.EVICTED, detail, holder, run[0].position, len(run))


def _runs(removed: Sequence[RemovedBlock]) -> list[list[RemovedBlock]]:
    """Removals by their cause, in the order in which each cause comes first."""
    by_reason: dict[str, list[RemovedBlock]] = {}
    for each in removed:
        by_reason.setdefault(each.reason, []).append(each)
    return list(by_reason.values())


def _index_reasons(evidence: MissEvidence) -> Iterator[MissReason]:
    if evidence.indexed is None:
        yield MissReason(MissKind.INDEX_AWAY, "the index does not answer, so nothing can be found by it")
        return
    for holder in sorted(evidence.answers.keys() | evidence.indexed.keys()):
        answer, indexed = evidence.answers.get(holder), evidence.indexed.get(holder, 0)
        # A worker's own pool is not in the index; a holder that did not answer is named by its error.
        if answer is None or not holder.startswith("node:") or answer.held_blocks == indexed:
            continue
        detail = f"the index says that it has {indexed} leading blocks, it has {answer.held_blocks}"
        first = min(indexed, answer.held_blocks)
        yield MissReason(MissKind.INDEX_DIFFERS, detail, holder, first, abs(indexed - answer.held_blocks))


def _gone(evidence: MissEvidence, best: int) -> Iterator[MissReason]:
    for holder, ago_s in evidence.gone_s.items():
        detail = f"last seen {ago_s:.0f} s ago; what only it had went with it"
        yield MissReason(MissKind.HOLDER_GONE, detail, holder, best, len(evidence.chain) - best)


def _elsewhere(evidence: MissEvidence, best: int) -> Iterator[MissReason]:
    """The same tokens in other namespaces, with the fields that keep them apart."""
    own, by_id = evidence.namespace, {namespace.id: namespace for namespace in evidence.live}
    for namespace, base in evidence.elsewhere.items():
        other = by_id.get(base)
        if base == own.id:
            differs = "trust_group differs: another tenant or cache_salt"
        elif other is None:
            differs = "no live worker announces it, so which field differs is not known"
        else:
            differs = f"{', '.join(own.differing_fields(other))} differ"
        yield MissReason(MissKind.OTHER_NAMESPACE, f"the same tokens are in namespace {namespace}; {differs}", "", best)


def _never(evidence: MissEvidence) -> str:
    remembers = [answer.remembers_s for answer in evidence.answers.values() if answer.remembers_s is not None]
    if not remembers:
        return "never stored, as far as is known: no store node answered"
    return f"never stored, or lost before the store nodes' memory begins ({min(remembers):.0f} s ago)"
