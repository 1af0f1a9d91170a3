"""The routers that people run today, from their published rules with their published defaults.

Each chooses a prefill worker; the decode worker is the one with least KV, as none of the rules for it sees more. With a
pool, each worker loads what the pool has beyond its own memory when that is faster than computing it. What a rule needs
beyond the fleet's own state (trees by routed requests, windows, counters) it keeps itself, as the original does.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.choose_placement import rendezvous
from headrace.core.prefix_map import PrefixMap
from headrace.simulate.simulated_fleet import QueueOrder, RoutePlan, SimulatedFleet, SimulatedRequest


class Baseline:
    """What all baselines share: hand over to the decode worker with least KV, and fetch from the pool what pays."""

    name = ""
    order = QueueOrder.FIRST_COME
    keeps_chains_together = False

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.fleet = fleet
        self.workers = np.array(fleet.model.prefillers)
        self._decoders = np.array(fleet.model.decoders)
        self._ids = np.random.default_rng(1).integers(0, 2**63, len(self.workers), dtype=np.uint64)

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        """Index into `workers`. `matched`: leading prompt tokens that each of them has in its own memory."""
        raise NotImplementedError

    def route(self, request: SimulatedRequest) -> RoutePlan:
        """As RoutePolicy.route."""
        fleet, model = self.fleet, self.fleet.model
        depths = fleet.device.depths(request.chain, model.num_workers) * fleet.block_tokens
        matched = np.minimum(depths[self.workers], request.input_tokens - 1)
        index = self.choose(request, matched)
        worker, own = int(self.workers[index]), int(matched[index])
        start, end, source = self._fetch(request, worker, own)
        work_s = float(model.prefill.seconds(own, start)) + float(model.prefill.seconds(end, request.input_tokens))
        if model.mixed_workers:
            return RoutePlan(worker, worker, work_s, start, end, source)
        decode = int(self._decoders[fleet.decode_tokens[self._decoders].argmin()])
        return RoutePlan(worker, decode, work_s, start, end, source)

    def _fetch(self, request: SimulatedRequest, worker: int, own: int) -> tuple[int, int, int]:
        fleet, model = self.fleet, self.fleet.model
        if not fleet.hosts:
            return own, own, -1
        blocks = fleet.host.depths(request.chain, model.num_workers)
        source = worker if blocks[worker] == blocks.max() else int(blocks.argmax())
        end = min(int(blocks[source]) * fleet.block_tokens, request.input_tokens - 1)
        moved = max(0, end - own) * model.kv_token_bytes
        if end <= own or model.network.seconds(moved) >= model.prefill.seconds(own, end):
            return own, own, -1
        return own, end, source


class RoundRobin(Baseline):
    """One after the other."""

    name = "round-robin"

    def __init__(self, fleet: SimulatedFleet) -> None:
        super().__init__(fleet)
        self._next = 0

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        self._next = (self._next + 1) % len(self.workers)
        return self._next


class LeastRequests(Baseline):
    """Fewest requests under way."""

    name = "least-requests"

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        return int(self.fleet.prefills[self.workers].argmin())


class LeastWork(Baseline):
    """Least predicted seconds in the queue, whatever is cached: what a pool needs no more than."""

    name = "least-work"

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        return int(self.fleet.queue_s()[self.workers].argmin())


class ConsistentHash(Baseline):
    """The worker that the first blocks hash to (two of them: the first alone is often everybody's)."""

    name = "consistent-hash"

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        key = request.chain[:2][-1] * 0x9E3779B97F4A7C15 if request.chain else request.number
        return int(rendezvous(self._ids, key).argmax())


class SglangCacheAware(Baseline):
    """SGLang gateway: least loaded when loads differ by 64 and 1.5 times; else the longest match if it is over 30 % of
    the prompt, else the worker with the smallest tree. Trees hold what was routed, up to a bound."""

    name = "sglang"
    balance_abs, balance_rel, cache_threshold = 64, 1.5, 0.3
    tree_blocks_max = 67_108_864 // 512

    def __init__(self, fleet: SimulatedFleet) -> None:
        super().__init__(fleet)
        self._trees = PrefixMap[int]()
        self._sizes: list[OrderedDict[int, None]] = [OrderedDict() for _ in self.workers]

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        load = self.fleet.prefills[self.workers]
        if load.max() - load.min() > self.balance_abs and load.max() > self.balance_rel * load.min():
            index = int(load.argmin())
        else:
            depths = self._trees.depths(request.chain, len(self.workers)) * self.fleet.block_tokens
            best = int(depths.argmax())
            if depths[best] / request.input_tokens > self.cache_threshold:
                index = best
            else:
                index = int(np.argmin([len(size) for size in self._sizes]))
        self._remember(index, request.chain)
        return index

    def _remember(self, index: int, chain: tuple[int, ...]) -> None:
        tree = self._sizes[index]
        self._trees.add(index, chain)
        for block in chain:
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self.tree_blocks_max:
            gone, _ = tree.popitem(last=False)
            self._trees.remove(index, (gone,))


class Dynamo(Baseline):
    """Dynamo KV router: cost = prefill blocks after overlap credit + decode blocks; lowest wins. Credit of a block on
    the device 1.0, on the host 0.75."""

    name = "dynamo"

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        fleet, block = self.fleet, self.fleet.block_tokens
        prompt_blocks = request.input_tokens / block
        credit = matched / block
        if fleet.hosts:
            host = fleet.host.depths(request.chain, fleet.model.num_workers)[self.workers]
            credit = credit + 0.75 * np.maximum(host - credit, 0)
        prefill = np.maximum(fleet.pending_tokens[self.workers] / block + prompt_blocks - credit, 0)
        decode = fleet.decode_tokens[self.workers] / block + prompt_blocks
        return int((prefill + decode).argmin())


class LlmD(Baseline):
    """llm-d: prefix score (normalised by the best pod) x 3 + KV free x 2 + queue x 2; the highest wins."""

    name = "llm-d"

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        fleet = self.fleet
        score = matched / fleet.block_tokens
        if fleet.hosts:
            host = fleet.host.depths(request.chain, fleet.model.num_workers)[self.workers]
            score = score + 0.8 * np.maximum(host - score, 0)
        prefix = score / score.max() if score.max() > 0 else score
        queue = fleet.prefills[self.workers].astype(float)
        spread = queue.max() - queue.min()
        queue_score = (queue.max() - queue) / spread if spread > 0 else np.ones_like(queue)
        kv_free = 1.0 - np.array([fleet.memory_use(worker) for worker in fleet.model.prefillers])
        return int((3 * prefix + 2 * kv_free + 2 * queue_score).argmax())


class Aibrix(Baseline):
    """AIBrix prefix-cache: least running when counts differ by more than 8; else by match, then running, the first with
    running at most mean + one standard deviation."""

    name = "aibrix"

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        running = self.fleet.prefills[self.workers]
        if running.max() - running.min() > 8:
            return int(running.argmin())
        bound = running.mean() + running.std()
        for index in np.lexsort((running, -matched)):
            if matched[index] > 0 and running[index] <= bound:
                return int(index)
        return int(running.argmin())


class RayPrefixAffinity(Baseline):
    """Ray Serve's PrefixCacheAffinityRouter: power of two choices when queues differ by more than 10; else, if the best
    match is at least 10 %, the shorter queue of two among the best matches, else of those with the smallest tree."""

    name = "ray"
    imbalanced_threshold, match_rate = 10, 0.1

    def __init__(self, fleet: SimulatedFleet) -> None:
        super().__init__(fleet)
        self._trees = PrefixMap[int]()
        self._sizes = np.zeros(len(self.workers), dtype=np.int64)
        self._draw = np.random.default_rng(0)

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        queue = self.fleet.prefills[self.workers]
        depths = self._trees.depths(request.chain, len(self.workers))
        if queue.max() - queue.min() > self.imbalanced_threshold:
            among = np.arange(len(self.workers))
        elif depths.max() * self.fleet.block_tokens >= self.match_rate * request.input_tokens and depths.max() > 0:
            among = np.flatnonzero(depths == depths.max())
        else:
            among = np.flatnonzero(self._sizes == self._sizes.min())
        two = self._draw.choice(among, size=min(2, len(among)), replace=False)
        index = int(two[queue[two].argmin()])
        self._sizes[index] += len(request.chain) - int(depths[index])
        self._trees.add(index, request.chain)
        return index


@dataclass(slots=True)
class _Routed:
    """A request in Preble's window."""

    at_s: float
    index: int
    work_s: float


class Preble(Baseline):
    """Preble E2: exploit when the matched path is longer than the rest (holders, least cost first), else the worker of
    least load over a window of three minutes, its evictions counted in."""

    name = "preble"
    window_s, tpot_s, output_tokens = 180.0, 0.15, 45

    def __init__(self, fleet: SimulatedFleet) -> None:
        super().__init__(fleet)
        self._trees = PrefixMap[int]()
        self._window: deque[_Routed] = deque()
        self._load_s = np.zeros(len(self.workers))

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        fleet, cost = self.fleet, self.fleet.model.prefill
        while self._window and self._window[0].at_s < fleet.now_s - self.window_s:
            old = self._window.popleft()
            self._load_s[old.index] -= old.work_s
        depths = self._trees.depths(request.chain, len(self.workers)) * fleet.block_tokens
        best = int(depths.max())
        missing = request.input_tokens - best
        cached = np.array([fleet.cached_tokens(worker) for worker in fleet.model.prefillers])
        evictions_s = float(cost.seconds(0, missing)) * (cached + missing > fleet.model.device_tokens)
        total_s = self._load_s + evictions_s
        if best > request.input_tokens - best:
            holders = np.flatnonzero(depths == best)
            index = int(holders[total_s[holders].argmin()])
        else:
            index = int(total_s.argmin())
        own = min(int(depths[index]), request.input_tokens - 1)
        work_s = float(cost.seconds(own, request.input_tokens)) + self.tpot_s * self.output_tokens / 16
        self._window.append(_Routed(fleet.now_s, index, work_s))
        self._load_s[index] += work_s
        self._trees.add(index, request.chain)
        return index


class Mooncake(Baseline):
    """Mooncake: least predicted TTFT = queue + prefill of what its own prefix leaves; with a pool, a worker whose own
    prefix is much shorter than the best takes the transfer of the best instead."""

    name = "mooncake"
    balancing_threshold = 2.0

    def choose(self, request: SimulatedRequest, matched: np.ndarray) -> int:
        fleet, cost = self.fleet, self.fleet.model.prefill
        queue_s = fleet.queue_s()[self.workers]
        ttft = queue_s + cost.seconds(matched, request.input_tokens)
        if fleet.hosts:
            host = fleet.host.depths(request.chain, fleet.model.num_workers) * fleet.block_tokens
            best = min(int(host.max()), request.input_tokens - 1)
            moved_s = fleet.model.network.seconds(np.maximum(best - matched, 0) * fleet.model.kv_token_bytes)
            remote = queue_s + moved_s + cost.seconds(best, request.input_tokens)
            take = best > self.balancing_threshold * matched
            ttft = np.where(take, np.minimum(ttft, remote), ttft)
        return int(ttft.argmin())


BASELINES: dict[str, Any] = {
    policy.name: policy
    for policy in (
        RoundRobin,
        LeastRequests,
        LeastWork,
        ConsistentHash,
        SglangCacheAware,
        Dynamo,
        LlmD,
        Aibrix,
        RayPrefixAffinity,
        Preble,
        Mooncake,
    )
}
