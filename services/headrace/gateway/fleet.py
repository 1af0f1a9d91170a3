"""Everybody who holds blocks, as the gateway's admin calls reach them: live store nodes and workers' own pools.

Owns who is asked, under which time limit, and how an outside selector becomes one that holders understand. What they
are asked is each admin verb's own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from headrace.core.block import HolderId
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.generation import ControlReport, DeviceListing, EvictSelector
from headrace.core.limits import ADMIN_CALL_TIMEOUT_MS
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.name_accounts import name_accounts
from headrace.gateway.resolve_selector import resolve_selector
from headrace.gateway.service import GatewayService
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

Result = TypeVar("Result")

TIMEOUT_S = ADMIN_CALL_TIMEOUT_MS / 1000

IS_ELSEWHERE = "it is of another Ray cluster; ask a gateway of that one"


class Fleet:
    """One gateway's view of all holders. `channel_to` gives the gRPC channel to an address."""

    def __init__(self, service: GatewayService, *, channel_to: Callable[[str], grpc.aio.Channel]) -> None:
        self.service = service
        self._channel_to = channel_to

    async def holders(self, named: Sequence[str]) -> tuple[list[StoreNodeRecord], list[WorkerRecord]]:
        """The live holders of these names that can be asked; all of them when none is named. Raises InvalidRequest for
        an unknown one."""
        nodes, workers = await self.service.membership.store_nodes(), self.service.table.records()
        live = [*(node.holder_id for node in nodes), *(worker.holder_id for worker in workers)]
        live += [worker.holder_id for worker in self.service.workers_elsewhere()]
        unknown = [name for name in named if name not in live]
        if unknown:
            raise InvalidRequest(
                f"no live holder {unknown[0][:80]!r}; live: {', '.join(live) or 'none'}", param="holders"
            )
        return (
            [node for node in nodes if not named or node.holder_id in named],
            [worker for worker in workers if not named or worker.holder_id in named],
        )

    def elsewhere(self, named: Sequence[str] = (), selectors: Sequence[EvictSelector] | None = None) -> list[HolderId]:
        """Those of `holders` that cannot be asked (IS_ELSEWHERE says why), as far as the selectors can mean what they
        hold: whoever asks everybody names them too."""
        return [
            worker.holder_id
            for worker in self.service.workers_elsewhere()
            if (not named or worker.holder_id in named) and (selectors is None or self.for_worker(worker, selectors))
        ]

    async def node_named(self, holder: str) -> StoreNodeRecord:
        """The live store node of that holder name. Raises InvalidRequest."""
        await self.service.refresh()
        nodes, _ = await self.holders([holder])
        if not nodes:
            raise InvalidRequest(f"{holder[:80]!r} is no live store node", param="holder")
        return nodes[0]

    async def resolve(self, selector: admin_pb2.Selector, scope: AdminScope) -> tuple[EvictSelector, ...]:
        """What the selector means, for holders: one selector for each namespace that the caller may see."""
        await self.service.refresh()
        return await resolve_selector(
            selector,
            workers=self.service.table.records(),
            tokenizers=self.service.tokenizers,
            deadline=Deadline.after(TIMEOUT_S, self.service.clock),
            scope=scope,
            unix_ms=self.service.clock.unix_ms(),
        )

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """What a worker's own pool holds."""
        async with Deadline.after(TIMEOUT_S, self.service.clock).scope(f"listing what {worker.worker_id} holds"):
            return await self.service.calls.list_device(worker, selector, limit=limit)

    async def set_device_ttl(
        self, worker: WorkerRecord, selector: EvictSelector, *, ttl_s: float | None
    ) -> ControlReport:
        """Have a prefix go from a worker's own pool at a moment; None takes that back."""
        async with Deadline.after(TIMEOUT_S, self.service.clock).scope(f"setting a time to live on {worker.worker_id}"):
            return await self.service.calls.set_device_ttl(worker, selector, ttl_s=ttl_s)

    def namespace_to_account(self) -> dict[str, str]:
        """Whose the namespaces of live workers' models are."""
        return name_accounts((w.namespace for w in self.service.table.records()), self.service.key_ring)

    def for_worker(self, worker: WorkerRecord, selectors: Sequence[EvictSelector]) -> list[EvictSelector]:
        """The selectors that can mean blocks of this worker's pool: all but those of another worker's namespace. A
        narrowed namespace is no worker's own, so everybody is asked for its blocks."""
        others = {w.namespace.id for w in self.service.table.records()} - {worker.namespace.id}
        return [selector for selector in selectors if selector.namespace not in others]

    def node_stub(self, node: StoreNodeRecord) -> Any:
        """NodeAdmin of a store node."""
        stub_of: Any = admin_pb2_grpc.NodeAdminStub
        return stub_of(self._channel_to(node.address))

    def cache_stub(self, node: StoreNodeRecord) -> Any:
        """CacheAdmin of a store node."""
        stub_of: Any = admin_pb2_grpc.CacheAdminStub  # generated code is untyped
        return stub_of(self._channel_to(node.address))


@dataclass(frozen=True, slots=True)
class Answers(Generic[Result]):
    """What each node answered, and the errors of those that did not, by holder."""

    by_holder: dict[str, Result]
    errors: dict[str, str]


async def ask_each(
    nodes: Sequence[StoreNodeRecord], ask: Callable[[StoreNodeRecord], Awaitable[Result]]
) -> Answers[Result]:
    """Ask all nodes at the same time. A failed call, or an answer that cannot be read, is that node's error."""

    async def ask_one(node: StoreNodeRecord) -> Result | HeadraceError:
        try:
            return await ask(node)
        except grpc.aio.AioRpcError as failed:
            return error_of_call(failed)
        except InvalidRequest as unreadable:
            return unreadable

    found = dict(zip((node.holder_id for node in nodes), await all_of([ask_one(node) for node in nodes]), strict=True))
    return Answers(
        by_holder={holder: answer for holder, answer in found.items() if not isinstance(answer, HeadraceError)},
        errors={holder: message_of(error) for holder, error in found.items() if isinstance(error, HeadraceError)},
    )


async def all_of(work: Sequence[Awaitable[Result]]) -> list[Result]:
    """Results in the order of `work`, run at the same time; a bug in one ends all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(item)) for item in work]
    return [task.result() for task in tasks]


async def _awaited(item: Awaitable[Result]) -> Result:
    return await item
