"""A small cluster of real workers over simulated nodes, for one seed: hosts, workers, and what must hold afterwards."""

import random
from dataclasses import dataclass

from simulated_engine import LAYOUT, SimulatedEngine, cold_answer, make_prompt
from simulated_nodes import FaultRates, SimulatedNode, SimulatedNodes
from virtual_loop import VirtualClock

from headrace.core.block import payload_digest
from headrace.core.errors import CacheFault
from headrace.core.generation import (
    AttemptId,
    CacheControl,
    DecodeCall,
    Finished,
    GenerateRequest,
    PrefillCall,
    RequestId,
    SamplingParams,
    TokenDelta,
    WorkerId,
)
from headrace.core.members import WorkerRole
from headrace.index.memory_index import MemoryMembership
from headrace.transfer.worker import Worker
from headrace.transfer.worker_member import WorkerPlace

NO_FAULTS = FaultRates()
EVERYTHING = CacheControl()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got from one decode attempt."""

    token_ids: list[int]
    finished: Finished


class World:
    """Hosts "a" and "b", each with a store node; worker ids say the host they are on: "prefill-a", "decode-a", ..."""

    def __init__(
        self, clock: VirtualClock, *, seed: int = 0, rates: FaultRates = NO_FAULTS, num_slots: int = 64
    ) -> None:
        self.clock = clock
        self.rng = random.Random(seed)
        self.nodes = {host: SimulatedNode(host, num_slots=num_slots, clock=clock, rng=self.rng) for host in ("a", "b")}
        self.faults: list[CacheFault] = []
        self.workers: dict[str, Worker] = {}
        self._membership = MemoryMembership(clock)
        self._rates = rates
        self._num_attempts = 0

    async def add_worker(self, worker_id: str, role: WorkerRole, *, pool_blocks: int = 64) -> Worker:
        host = worker_id.rsplit("-", 1)[1]
        nodes = SimulatedNodes(host, self.nodes, self._rates)
        engine = SimulatedEngine(num_blocks=pool_blocks, clock=self.clock, rng=self.rng)
        worker = Worker(
            WorkerPlace(WorkerId(worker_id), role, host),
            engine,
            nodes=nodes,
            node_table=nodes,
            membership=self._membership,
            clock=self.clock,
            report_fault=self.faults.append,
        )
        await worker.start()
        self.workers[worker_id] = worker
        return worker

    def request(self, token_ids: list[int], *, max_tokens: int = 4, cache: CacheControl = EVERYTHING):
        return GenerateRequest(
            request_id=RequestId(f"request-{self._num_attempts}"),
            model="simulated",
            prompt=make_prompt(token_ids),
            sampling=SamplingParams(max_tokens=max_tokens),
            cache=cache,
        )

    def prefill_call(self, worker: Worker, request: GenerateRequest, **fields) -> PrefillCall:
        return PrefillCall(
            attempt_id=self.new_attempt(),
            request=request,
            worker_id=worker.worker_id,
            **{"timeout_ms": 60_000} | fields,
        )

    def decode_call(self, worker: Worker, request: GenerateRequest, **fields) -> DecodeCall:
        defaults = {"timeout_ms": 60_000, "computed_from": len(request.prompt.chain)}
        return DecodeCall(
            attempt_id=self.new_attempt(), request=request, worker_id=worker.worker_id, **defaults | fields
        )

    def new_attempt(self) -> AttemptId:
        self._num_attempts += 1
        return AttemptId(f"attempt-{self._num_attempts}")

    async def stop(self) -> None:
        for worker in self.workers.values():
            await worker.stop()

    def check_at_rest(self) -> None:
        """After traffic, and after every lease could expire: nothing is held, and all bytes anywhere are right."""
        known_kv = {}
        for worker in self.workers.values():
            engine = worker.engine
            assert worker.attempts_running == 0
            engine.pool.check_integrity()
            assert engine.pool.available_blocks == engine.pool.num_blocks, f"{worker.worker_id} leaked blocks"
            known_kv |= engine.known_kv
        for node in self.nodes.values():
            if node.node is None:
                continue
            node.node.expire()
            node.node.check_integrity()
            stat = node.node.stat()
            assert (stat.reserved_blocks, stat.leased_blocks) == (0, 0), f"node {node.node_id}: {stat}"
            self._check_bytes(node, known_kv)

    def _check_bytes(self, node: SimulatedNode, known_kv: dict) -> None:
        for namespace, block_hash in node.node.inventory():
            held = node.node._blocks.get(namespace, block_hash)
            payload = bytes(node.arena.payload(held.slot, LAYOUT.block_bytes))
            refused = payload_digest(payload) != held.header.payload_xxh3  # flipped, or hit by a writer without a slot
            assert refused or payload == known_kv[block_hash], "a wrong block is readable"


async def answer_of(events) -> Answer:
    """Read a stream to its end; exactly one Finished, and it is last."""
    token_ids: list[int] = []
    finished: list[Finished] = []
    async for event in events:
        assert not finished, "an event after Finished"
        if isinstance(event, TokenDelta):
            token_ids.append(event.token_id)
        else:
            finished.append(event)
    assert len(finished) == 1
    return Answer(token_ids, finished[0])


def check_answer(answer: Answer, request: GenerateRequest) -> None:
    """The tokens are those of a cold computation, and the usage adds up."""
    prompt = request.prompt
    assert answer.token_ids == cold_answer(prompt.token_ids, request.sampling.max_tokens)
    usage = answer.finished.usage
    assert usage.prompt_tokens == len(prompt.token_ids)
    assert usage.completion_tokens == len(answer.token_ids)
    assert 0 <= usage.cached.total <= (len(prompt.token_ids) - 1) // LAYOUT.block_tokens * LAYOUT.block_tokens
    for source, tokens in usage.cached.by_source().items():
        assert tokens % LAYOUT.block_tokens == 0
        assert tokens == 0 or source in request.cache.sources
