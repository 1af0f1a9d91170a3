"""A whole system in one process and without Ray: a real gateway over real workers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from headrace.config import EngineSettings, GatewaySettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.core.clock import SystemClock
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import (
    CacheControl,
    CachedTokens,
    DecodeCall,
    DecodeEvent,
    DeviceListing,
    EvictReport,
    EvictSelector,
    PrefillCall,
    PrefillResult,
    WorkerId,
)
from headrace.core.members import WorkerRecord
from headrace.core.ports import BlockIndex, Membership
from headrace.core.tenants import Tenant
from headrace.decode.decode_tokens import decode_tokens
from headrace.engine.load_model import LoadedModel, load_model
from headrace.gateway.accepted import Accepted
from headrace.gateway.route_request import ChoiceToken
from headrace.gateway.service import Backend, GatewayService
from headrace.prefill.prefill_prompt import prefill_prompt
from headrace.wire.client_request import ClientRequest, SamplingOptions, TokenPrompt

from .conftest import TestWorker

EVERYTHING = CacheControl()


class DirectCalls:
    """WorkerCalls to workers of this process, by id; one that was taken out is unreachable."""

    def __init__(self) -> None:
        self.workers: dict[str, TestWorker] = {}
        self.prefills: list[PrefillCall] = []
        self.decodes: list[DecodeCall] = []

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        self.prefills.append(call)
        return await prefill_prompt(call, self._of(call.worker_id).worker)

    async def decode(self, call: DecodeCall) -> AsyncIterator[DecodeEvent]:
        self.decodes.append(call)
        async with aclosing(decode_tokens(call, self._of(call.worker_id).worker)) as events:
            async for event in events:
                yield event

    async def evict_device(self, worker: WorkerRecord, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        return self._of(worker.worker_id).worker.evict_device(selector, dry_run=dry_run)

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        return self._of(worker.worker_id).worker.list_device(selector, limit=limit)

    def _of(self, worker_id: str) -> TestWorker:
        if worker_id not in self.workers:
            raise WorkerUnavailable(worker_id, "is gone")
        return self.workers[worker_id]


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as its client saw it."""

    token_ids: tuple[int, ...]
    cached: CachedTokens
    worker_id: str
    ttft_cpu_s: float  # processor time that this process spent until then: what a loaded machine does not change


@dataclass
class SmallSystem:
    """A started gateway, and a way to ask it."""

    gateway: GatewayService
    calls: DirectCalls = field(default_factory=DirectCalls)

    async def ask(
        self,
        token_ids: list[int],
        *,
        model: str = "",
        group: str = "",
        cache: CacheControl = EVERYTHING,
        max_tokens: int = 2,
        timeout_ms: int = 120_000,
        prefill_worker: str | None = None,
    ) -> Answered:
        """Greedy tokens through the gateway. Raises what a client would be told."""
        request = ClientRequest(
            model=model,
            prompt=TokenPrompt(tuple(token_ids)),
            sampling=SamplingOptions(max_tokens=max_tokens, ignore_eos=True),
            cache=cache,
            timeout_ms=timeout_ms,
            prefill_worker=prefill_worker and WorkerId(prefill_worker),
        )
        answer: list[int] = []
        began_cpu_s, first_cpu_s = time.process_time(), 0.0
        async with aclosing(self.gateway.generate(request, Tenant(group or "all", group))) as events:
            async for event in events:
                if isinstance(event, ChoiceToken):
                    if not answer:
                        first_cpu_s = time.process_time()
                    answer.append(event.delta.token_id)
                elif not isinstance(event, Accepted):
                    finished = event.finished
        return Answered(tuple(answer), finished.usage.cached, finished.worker_id, first_cpu_s - began_cpu_s)

    async def announced(self, *workers: TestWorker) -> None:
        """Have the gateway know how busy these are, and what they have measured, as of now."""
        for tested in workers:
            await tested.worker._member._announce()
        await self.gateway.refresh()

    async def listed(self, *worker_ids: str) -> None:
        """Wait until the gateway knows exactly these workers."""
        async with asyncio.timeout(60):
            while {record.worker_id for record in self.gateway.table.live()} != set(worker_ids):
                await self.gateway.refresh()
                await asyncio.sleep(0.01)


@asynccontextmanager
async def small_system(
    *workers: TestWorker, index: BlockIndex, membership: Membership, **settings: int
) -> AsyncIterator[SmallSystem]:
    """A gateway over these workers, which may be added to and taken from its calls while it runs."""
    calls = DirectCalls()
    calls.workers = {tested.worker.worker_id: tested for tested in workers}
    gateway = GatewayService(Backend(index, membership, calls), GatewaySettings(**settings), clock=SystemClock())
    await gateway.start()
    try:
        yield SmallSystem(gateway, calls)
    finally:
        await gateway.stop()
        assert gateway.inflight == 0
        assert not gateway.table.in_flight_counts()


def load_again(model: LoadedModel, *, block_tokens: int, pool_blocks: int, path: str = "") -> LoadedModel:
    """The same weights (or those under another path) with a pool of its own."""
    return load_model(
        ModelSettings(
            model=path or str(model.path),
            device="cpu",
            torch_threads=1,
            model_cache_dir=str(model.path / "cache"),
            dtype="float32",
        ),
        EngineSettings(block_tokens=block_tokens, pool_tokens=pool_blocks * block_tokens),
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lambda line: None,
    )
