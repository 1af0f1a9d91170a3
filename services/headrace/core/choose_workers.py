"""Which workers serve a request: a pure decision over a snapshot, without clock, network or randomness of its own.

The plan of least predicted cost in seconds, by `choose_placement.py`: who prefills, who decodes, and whether the decode
worker computes the prompt itself, chosen together. A plan's cost is

    ttft = max(wait, fetch) + compute [+ hand_off]
    cost = ttft + price + interference + decode + memory

in which `decode` is what the first output tokens take on that worker, and `memory` what a full pool makes a sequence
wait. Predictions are not better than `TIE_S`: among plans within it, the one whose worker has most of the prompt at
hand wins, then the least loaded, then the rendezvous hash.

This file does not know how matches are found, how calls are made, or what a failed call means.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.candidate_costs import CandidateCosts, Snapshot
from headrace.core.choose_placement import TIE_S, Floats, Ints, rendezvous
from headrace.core.decision import PlanColumns, PlanReason, RouteDecision, SettledBy
from headrace.core.errors import InvalidRequest
from headrace.core.generation import GenerateRequest, WorkerId
from headrace.core.limits import DECISION_PLANS_MAX
from headrace.core.members import WorkerRecord
from headrace.core.worker_columns import tokens_max

# A decode worker whose sequences hold more of its memory than this computes no prompts for others to wait behind.
MEMORY_USE_MAX = 0.9

TieBreak = Callable[[WorkerId], float]


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """What an operator settles (see `config.GatewaySettings`)."""

    local_prefill_tokens: int  # more missing tokens are not computed by a decode worker while a prefill worker is there


@dataclass(frozen=True, slots=True)
class Plan:
    """Who decodes, who prefills first (None: the decode worker computes what is missing), and where blocks are."""

    decode: WorkerRecord
    prefill: WorkerRecord | None
    missing_tokens: int  # prompt tokens that nobody the decode worker may read from is believed to hold
    hint_nodes: tuple[str, ...]  # store nodes worth loading from for the worker that computes, longest run first
    reason: PlanReason
    decision: RouteDecision

    def work_s(self, worker_id: WorkerId) -> float:
        """Predicted seconds of this worker's time until the first token."""
        terms = self.decision.chosen
        if worker_id == (terms.prefill_worker or terms.decode_worker):
            return terms.compute_s
        return terms.hand_off_s if worker_id == terms.decode_worker else 0.0


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No live worker can decode this request."""

    why: str


def choose_workers(
    request: GenerateRequest, snapshot: Snapshot, rule: RoutingRule, *, tie_break: TieBreak | None = None
) -> Plan | NoWorker:
    """The plan of least predicted cost, as above, among workers that can do the work.

    A decode worker computes the prompt itself when that costs no more than having it computed and handed over, and it
    lacks at most `local_prefill_tokens` or the way from the prefill worker is slow; without a prefill worker whose
    blocks it may read, always.
    tie_break: settles what the rendezvous hash would, smallest wins, for requests without an affinity key.
    Raises InvalidRequest when the request names a worker that cannot serve it.
    """
    columns = snapshot.workers
    _check_asked(request, columns.records)
    assert not len(columns) or columns.records[0].model == request.model
    serving = np.ones(len(columns), dtype=bool)
    serving[[columns.row_of[worker_id] for worker_id in snapshot.failed if worker_id in columns.row_of]] = False
    tokens = len(request.prompt.token_ids)
    decoders = np.flatnonzero(serving & columns.decodes & (tokens + request.sampling.max_tokens <= columns.tokens_max))
    if request.decode_worker is not None:
        decoders = decoders[decoders == columns.row_of[request.decode_worker]]
    if not len(decoders):
        return NoWorker(why=_why_no_decoder(request, snapshot))
    costs = CandidateCosts(request, snapshot)
    prefillers = np.flatnonzero(serving & columns.prefills & (tokens <= columns.tokens_max))
    computing, decode, decision = _Choice(request, costs, rule, decoders, tie_break).decide(prefillers)
    reachable = min(max(int(costs.indexed_blocks[decode]), costs.far_blocks), len(request.prompt.chain))
    return Plan(
        decode=columns.records[decode],
        prefill=None if computing == decode else columns.records[computing],
        missing_tokens=tokens - reachable * request.prompt.block_tokens,
        hint_nodes=_best_first(costs.node_runs) if costs.fetches_far(computing) else (),
        reason=_reason(request, costs.indexed_blocks, decoders, decode),
        decision=decision,
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """One choice under way. Workers are rows of the snapshot's columns."""

    request: GenerateRequest
    costs: CandidateCosts
    rule: RoutingRule
    decoders: Ints
    tie_break: TieBreak | None

    def decide(self, prefillers: Ints) -> tuple[int, int, RouteDecision]:
        """The worker that computes the prompt, the one that decodes (maybe the same), and why.

        Handing over is first taken to cost the least that it can; for which pair it is, and what that costs, is looked
        at only when no decode worker alone is cheaper."""
        costs = self.costs
        alone_s = costs.local_cost_s()[self.decoders]
        prefillers, over_s = self._able_to_hand_over(prefillers)
        barred = self._barred() & (len(prefillers) > 0)
        may_be_alone = not len(prefillers) or self.request.prefill_worker is None
        over: tuple[int, int, float] | None = None
        over_cost_s = float(over_s.min(initial=np.inf))  # at least; what it is for certain, once there is a pair
        if not may_be_alone or self._least(alone_s, barred) > over_cost_s:
            prefill, settled_by = self._pick(prefillers, over_s, [(self._beside_decoders(), SettledBy.NEAR)])
            over = (prefill, *self._pick_decode(prefill))
            over_cost_s = float(costs.cost_s(*over))
            if costs.comes_late(*over):
                barred &= self._memory_is_full()
        if over is None or (may_be_alone and self._least(alone_s, barred) < over_cost_s):
            alone = ~barred
            decode, settled_by = self._pick(self.decoders[alone], alone_s[alone], [(-costs.load, SettledBy.LOAD)])
            chosen = (decode, decode, 0.0)
        else:
            chosen = over
        named = self.request.decode_worker is not None or self.request.prefill_worker is not None
        plans = self._plans(chosen, prefillers, np.concatenate([alone_s, over_s]), barred)
        decision = RouteDecision(
            prompt_tokens=len(self.request.prompt.token_ids),
            plans=plans,
            chosen=plans.first(),
            num_considered=len(self.decoders) + len(prefillers),
            settled_by=SettledBy.ASKED if named else settled_by,
            price=costs.price,
        )
        return chosen[0], chosen[1], decision

    @staticmethod
    def _least(alone_s: Floats, barred: NDArray[np.bool_]) -> float:
        """Of the decode workers that may compute the prompt; infinite without any."""
        return float(alone_s[~barred].min(initial=np.inf))

    def _memory_is_full(self) -> NDArray[np.bool_]:
        full: NDArray[np.bool_] = self.costs.columns.memory_use[self.decoders] >= MEMORY_USE_MAX
        return full

    def _barred(self) -> NDArray[np.bool_]:
        """Decode workers that must not compute this prompt while a prefill worker can, [decoders]. One that prefills
        for others anyway, too, may; what is less than a block can only be computed where it is decoded."""
        columns, block_tokens = self.costs.columns, self.request.prompt.block_tokens
        computed = self.costs.computed_tokens[self.decoders]
        tokens_max_here = max(self.rule.local_prefill_tokens, block_tokens - 1)
        too_much = (computed > tokens_max_here) | self._memory_is_full()
        barred: NDArray[np.bool_] = too_much & ~columns.prefills[self.decoders] & (computed >= block_tokens)
        return barred

    def _why_barred(self, row: int) -> str:
        if self.costs.columns.memory_use[row] >= MEMORY_USE_MAX:
            return "its memory is nearly full"
        return "it lacks more than local_prefill_tokens"

    def _able_to_hand_over(self, prefillers: Ints) -> tuple[Ints, Floats]:
        """Those whose blocks a decode worker may read, and what computing there and handing over costs at least."""
        request, costs = self.request, self.costs
        missing_blocks = costs.computed_tokens[self.decoders].min() // request.prompt.block_tokens
        if not request.cache.publish or not request.prompt.chain or missing_blocks == 0:
            return prefillers[:0], np.zeros(0)
        if request.prefill_worker is not None:
            prefillers = prefillers[prefillers == costs.columns.row_of[request.prefill_worker]]
        over_s = costs.scores.cost_s[prefillers] + costs.least_hand_over_s(prefillers, self.decoders)
        able = np.isfinite(over_s)
        return prefillers[able], over_s[able]

    def _beside_decoders(self) -> Ints:
        """1 for workers whose store node a decode worker maps: what they publish needs no network."""
        columns = self.costs.columns
        mapped: Ints = np.zeros(len(columns.nodes) + 1, dtype=np.int64)  # the last one stands for no node
        mapped[columns.node[self.decoders[columns.maps_node[self.decoders]]]] = 1
        return mapped[columns.node]

    def _pick_decode(self, prefill: int) -> tuple[int, float]:
        """Who decodes what `prefill` computes, and the seconds of the hand-over."""
        costs = self.costs
        hand_off_s = costs.hand_off_s(prefill, self.decoders)
        able = np.isfinite(hand_off_s)
        decoders, hand_off_s = self.decoders[able], hand_off_s[able]
        beside = (costs.columns.node == costs.columns.node[prefill]).astype(np.int64)
        total_s = hand_off_s + costs.decode_s[decoders] + costs.memory_s[decoders]
        decode, _ = self._pick(decoders, total_s, [(beside, SettledBy.NEAR), (-costs.load, SettledBy.LOAD)])
        return decode, float(hand_off_s[decoders == decode][0])

    def _pick(self, rows: Ints, cost_s: Floats, preferences: list[tuple[Ints, SettledBy]]) -> tuple[int, SettledBy]:
        """The row of least cost; of those within TIE_S of it, the one with most of the prompt at hand, then the highest
        by each preference, then by what is in its own pool, then by affinity or hash. cost_s: [rows]."""
        near = rows[cost_s <= cost_s.min() + TIE_S]
        held = (self.costs.held_tokens, SettledBy.HELD)
        for values, name in [(None, SettledBy.COST), held, *preferences, (self.costs.device_tokens, SettledBy.HELD)]:
            if values is not None:
                of_near = values[near]
                near = near[of_near == of_near.max()]
            if len(near) == 1:
                return int(near[0]), name
        records, affinity = self.costs.columns.records, self.request.cache.affinity_key
        if self.tie_break is not None and not affinity:
            tie_break = self.tie_break
            return min(map(int, near), key=lambda row: tie_break(records[row].worker_id)), SettledBy.HASH
        key = _tie_key(self.request, self.costs.spared_blocks)
        return int(near[rendezvous(self.costs.columns.ids[near], key).argmax()]), SettledBy.HASH

    def _plans(
        self, chosen: tuple[int, int, float], prefillers: Ints, least_s: Floats, barred: NDArray[np.bool_]
    ) -> PlanColumns:
        """The chosen plan (who computes, who decodes, seconds of the hand-over) and the next best ones: every decode
        worker by itself, every prefill worker for the chosen decode worker. least_s: of each at least, in this order.
        """
        costs, (computes, decode, hand_off_s) = self.costs, chosen
        places = _least_first(least_s, DECISION_PLANS_MAX + 1)
        computing = np.concatenate([self.decoders, prefillers])[places]
        over = places >= len(self.decoders)
        decoding, hand_offs_s = np.where(over, decode, computing), np.zeros(len(places))
        if over.any():
            hand_offs_s[over] = costs.hand_offs_s(computing[over], decode)
        cost_s = costs.cost_s(computing, decoding, hand_offs_s)
        cost_s[(computing == computes) & (decoding == decode)] = np.inf
        rivals = np.argsort(cost_s, kind="stable")[: min(DECISION_PLANS_MAX, np.isfinite(cost_s).sum())]
        rows = computing[rivals].tolist()
        is_barred = [place < len(barred) and barred[place] for place in places[rivals].tolist()]
        return costs.terms(
            np.array([computes, *rows]),
            np.array([decode, *decoding[rivals].tolist()]),
            hand_off_s=np.array([hand_off_s, *hand_offs_s[rivals].tolist()]),
            barred=["", *(self._why_barred(row) if no else "" for row, no in zip(rows, is_barred, strict=True))],
        )


def _least_first(values: Floats, count: int) -> Ints:
    """Places of the `count` least values, least first, the earlier ones of equals first."""
    places: Ints = np.arange(len(values))
    if count < len(values):
        places = np.flatnonzero(values <= np.partition(values, count)[count])
    return places[np.argsort(values[places], kind="stable")][:count]


def _tie_key(request: GenerateRequest, spared_blocks: int) -> int:
    """Requests of one affinity key meet; others by the first block that whoever is chosen computes, which equal prompts
    have in common. Gateways that know the same agree without asking, and a worker that comes or goes moves only the
    keys that it wins or won. The trust group is hashed with the key, so that no tenant can tell or choose where another
    one's requests go; lengths keep the parts apart."""
    chain, key = request.prompt.chain, request.cache.affinity_key
    if key:
        parts = [part.encode() for part in (request.trust_group, key)]
        spelled = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    else:
        spelled = chain[min(spared_blocks, len(chain) - 1)] if chain else request.request_id.encode()
    return int.from_bytes(hashlib.blake2b(spelled, digest_size=8).digest(), "little")


def _check_asked(request: GenerateRequest, workers: Sequence[WorkerRecord]) -> None:
    """Refuse named workers that do not exist, have the other role, serve something else or cannot be of use."""
    for param, asked, role in (
        ("decode_worker", request.decode_worker, "decode"),
        ("prefill_worker", request.prefill_worker, "prefill"),
    ):
        if asked is None:
            continue
        able = [w for w in workers if (w.role.decodes if role == "decode" else w.role.prefills)]
        if asked not in {w.worker_id for w in able}:
            known = ", ".join(sorted(w.worker_id for w in able)) or "none"
            raise InvalidRequest(
                f"{param} {asked[:200]!r} is not a live {role} worker of model {request.model!r}; there are: {known}",
                param=param,
            )
    if request.prefill_worker is not None and not (request.cache.publish and request.cache.reads):
        raise InvalidRequest(
            "prefill_worker needs the cache for the hand-over; a request that bypasses or does not publish is computed"
            " by its decode worker alone",
            param="prefill_worker",
        )


def _why_no_decoder(request: GenerateRequest, snapshot: Snapshot) -> str:
    live = [worker for worker in snapshot.workers.records if worker.role.decodes]
    if not live:
        return f"no decode worker of model {request.model!r} is live"
    tokens = len(request.prompt.token_ids) + request.sampling.max_tokens
    if all(tokens > tokens_max(worker) for worker in live):
        return f"no live decode worker has room for {tokens} tokens"
    tried = sorted(worker.worker_id for worker in live if worker.worker_id in snapshot.failed)
    return f"of {len(live)} decode workers none is left to try (failed in this request: {', '.join(tried) or 'none'})"


def _reason(request: GenerateRequest, at_hand: Ints, decoders: Ints, decode: int) -> PlanReason:
    if request.decode_worker is not None:
        return PlanReason.ASKED
    longest = at_hand[decoders].max()
    if longest == 0:
        return PlanReason.NO_MATCH
    return PlanReason.MATCH if at_hand[decode] == longest else PlanReason.SOONER


def _best_first(node_runs: Mapping[str, int]) -> tuple[str, ...]:
    """Store nodes by length of their run, longest first; ties by name, so that all gateways agree."""
    return tuple(sorted(node_runs, key=lambda node: (-node_runs[node], node)))
