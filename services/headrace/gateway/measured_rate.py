"""How fast prompts are computed here, measured at this gateway's own calls: what a lost block costs in seconds.

A prefill attempt's time counts in full, queueing and loading included, so the rate is what a request would see now.
Knows nothing of who asks for it.
"""

from collections.abc import AsyncIterator, Callable

from headrace.core.clock import Clock
from headrace.core.generation import (
    ControlReport,
    DecodeCall,
    DecodeEvent,
    DeviceListing,
    EvictReport,
    EvictSelector,
    MeasuredWork,
    PrefillCall,
    PrefillResult,
    RequestId,
)
from headrace.core.members import WorkerRecord
from headrace.core.ports import WorkerCalls

# Weight of the newest attempt: ten attempts later an old rate counts for a tenth.
NEWEST_WEIGHT = 0.2


class PrefillRate:
    """Moving average of tokens per second; 0 until something was measured."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def add(self, *, tokens: int, seconds: float) -> None:
        """Take one attempt that computed `tokens` of a prompt."""
        if tokens <= 0 or seconds <= 0:
            return
        rate = tokens / seconds
        known = self.tokens_per_s or rate
        self.tokens_per_s = known + NEWEST_WEIGHT * (rate - known)


class TimedWorkerCalls:
    """WorkerCalls that measure what prefill attempts take; everything else passes through."""

    def __init__(
        self,
        calls: WorkerCalls,
        *,
        rate: PrefillRate,
        clock: Clock,
        measured: Callable[[RequestId, MeasuredWork], None] = lambda request_id, work: None,
    ) -> None:
        """measured: told what a prefill worker says that a request's prompt took."""
        self._calls = calls
        self._measured = measured
        self._rate = rate
        self._clock = clock

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """As WorkerCalls.prefill."""
        started_s = self._clock.now_s()
        result = await self._calls.prefill(call)
        if result.work is not None:
            self._measured(call.request.request_id, result.work)
        computed_blocks = result.published_blocks - result.reused_blocks
        tokens = computed_blocks * call.request.prompt.block_tokens
        self._rate.add(tokens=tokens, seconds=self._clock.now_s() - started_s)
        return result

    def decode(self, call: DecodeCall) -> AsyncIterator[DecodeEvent]:
        """As WorkerCalls.decode."""
        return self._calls.decode(call)

    async def evict_device(self, worker: WorkerRecord, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """As WorkerCalls.evict_device."""
        return await self._calls.evict_device(worker, selector, dry_run=dry_run)

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """As WorkerCalls.list_device."""
        return await self._calls.list_device(worker, selector, limit=limit)

    async def set_device_ttl(
        self, worker: WorkerRecord, selector: EvictSelector, *, ttl_s: float | None
    ) -> ControlReport:
        """As WorkerCalls.set_device_ttl."""
        return await self._calls.set_device_ttl(worker, selector, ttl_s=ttl_s)
