"""A prefill worker as a service: the calls that reach it, and its life. What it does is in `prefill_prompt.py`."""

from headrace.core.generation import DeviceListing, EvictReport, EvictSelector, PrefillCall, PrefillResult
from headrace.core.members import WorkerRecord
from headrace.prefill.prefill_prompt import prefill_prompt
from headrace.transfer.worker import Worker


class PrefillService:
    """Prefill calls on one `Worker`, which a `DecodeService` may share when its role is BOTH."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def start(self) -> None:
        """Start the worker and announce it."""
        await self._worker.start()

    async def stop(self) -> None:
        """Withdraw, drain and stop the worker. Idempotent."""
        await self._worker.stop()

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """One prefill attempt; see `prefill_prompt`."""
        return await prefill_prompt(call, self._worker)

    async def evict_device(self, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Evict from this worker's pool."""
        return self._worker.evict_device(selector, dry_run=dry_run)

    async def list_device(self, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """What this worker's pool holds."""
        return self._worker.list_device(selector, limit=limit)

    def record(self) -> WorkerRecord:
        """Who the worker is and how loaded it is now."""
        return self._worker.record()

    def healthy(self) -> bool:
        """Whether a request sent now can be served."""
        return self._worker.healthy()
