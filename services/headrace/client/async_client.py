"""The client over asyncio: as `client.py`, method by method. Belongs to the event loop that it was made in."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from headrace.client import admin_messages, messages
from headrace.client.admin_values import (
    EVERYTHING,
    BlockListing,
    DrainProgress,
    Eviction,
    Finding,
    MissExplanation,
    QuotaChange,
    Selector,
    StoredBlock,
    SystemStatus,
    TenantListing,
)
from headrace.client.errors import error_from_rpc
from headrace.client.messages import encode
from headrace.client.placement_values import RouteExplanation
from headrace.client.prepare_call import CHANNEL_OPTIONS, Access, RequestOptions, Target, prepare_call, target_of
from headrace.client.values import Event, GenerateResult, Prompt, ResultCollector, ServedModel
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import ControlReport, EvictReport, HolderStat
from headrace.core.limits import ADMIN_CLIENT_TIMEOUT_MS, DRAIN_CLIENT_TIMEOUT_MS
from headrace.transfer.channels import open_channel
from headrace.wire.v1 import admin_pb2, inference_pb2
from headrace.wire.v1.admin_pb2_grpc import CacheAdminStub
from headrace.wire.v1.inference_pb2_grpc import InferenceStub


class AsyncGenerateStream:
    """As GenerateStream, for asyncio. Cancelling the task that iterates cancels the request."""

    def __init__(self, call: Any, *, target: Target, started_s: float) -> None:
        self._call = call
        self._target = target
        self._collector = ResultCollector(started_s=started_s)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield Accepted, then TokenDelta for each token, then Done. Raises the server's typed error."""
        try:
            async for message in self._call:
                event = messages.event_from_message(message)
                if event is not None:
                    self._collector.add(event, now_s=time.monotonic())
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, target=self._target) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: grpc.aio uses the same exception for both.
            raise WorkerUnavailable("", "the call was cancelled by closing its stream or client") from None
        finally:
            self.close()

    async def result(self) -> GenerateResult:
        """Read what is left of the stream and return the whole."""
        async for _ in self:
            pass
        return self._collector.result(now_s=time.monotonic())

    def close(self) -> None:
        """Cancel what is under way. Idempotent; harmless after the end."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncHeadraceClient:
    """As HeadraceClient, for asyncio. Belongs to the event loop that it was made in."""

    def __init__(self, address: str, **access: Unpack[Access]) -> None:
        """address: `host:port`. access: API key, application and files of TLS, as `Access` says.

        Connects on first use. Raises InvalidRequest for what cannot be a key or a name, ConfigInvalid for a file that
        cannot be used."""
        self.address = address
        self._target = target_of(address, **access)
        with messages.refusing_unencodable():
            self._channel = open_channel(address, tls=self._target.tls, options=CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = CacheAdminStub(self._channel)  # type: ignore[no-untyped-call]

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncGenerateStream:
        """As HeadraceClient.stream."""
        call = prepare_call(prompt, **options)
        started_s = time.monotonic()
        events = self._inference.Generate(call.request, timeout=call.timeout_s, metadata=self._target.metadata)
        return AsyncGenerateStream(events, target=self._target, started_s=started_s)

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> GenerateResult:
        """As HeadraceClient.generate."""
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    async def list_models(self) -> tuple[ServedModel, ...]:
        """As HeadraceClient.list_models."""
        reply = await self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest())
        return messages.models_from_message(reply)

    async def status(self) -> SystemStatus:
        """As HeadraceClient.status."""
        return admin_messages.status_from_message(await self._ask(self._admin.Status, admin_pb2.StatusRequest()))

    async def stat(self) -> tuple[HolderStat, ...]:
        """As HeadraceClient.stat."""
        return admin_messages.stats_from_message(await self._ask(self._admin.Stat, admin_pb2.StatRequest()))

    async def list_blocks(
        self, selector: Selector = EVERYTHING, *, with_text: bool = False, limit: int = 0
    ) -> BlockListing:
        """As HeadraceClient.list_blocks."""
        selected = admin_messages.selector_message(selector)
        asked = encode(admin_pb2.ListBlocksRequest, selector=selected, with_text=with_text, limit=limit)
        return admin_messages.listing_from_message(await self._ask(self._admin.ListBlocks, asked))

    async def evict(self, selector: Selector, *, dry_run: bool = True) -> tuple[EvictReport, ...]:
        """As HeadraceClient.evict."""
        return (await self.price_eviction(selector, dry_run=dry_run)).reports

    async def price_eviction(self, selector: Selector, *, dry_run: bool = True, tokens_per_s: float = 0.0) -> Eviction:
        """As HeadraceClient.price_eviction."""
        selected = admin_messages.selector_message(selector)
        asked = encode(admin_pb2.EvictRequest, selector=selected, dry_run=dry_run, tokens_per_s=tokens_per_s)
        return admin_messages.eviction_from_message(await self._ask(self._admin.Evict, asked))

    async def why_miss(
        self, prompt: Prompt | None = None, *, model: str = "", request_id: str = "", cache_salt: str = ""
    ) -> MissExplanation:
        """As HeadraceClient.why_miss."""
        asked = admin_messages.why_miss_message(prompt, model=model, request_id=request_id, cache_salt=cache_salt)
        return admin_messages.explanation_from_message(await self._ask(self._admin.WhyMiss, asked))

    async def explain_route(self, request_id: str) -> RouteExplanation:
        """As HeadraceClient.explain_route."""
        asked = encode(admin_pb2.ExplainRouteRequest, request_id=request_id)
        return admin_messages.route_explanation_from_message(await self._ask(self._admin.ExplainRoute, asked))

    async def read_block(self, holder: str, *, namespace: str, chain: Sequence[bytes]) -> StoredBlock:
        """As HeadraceClient.read_block."""
        asked = encode(admin_pb2.ReadBlockRequest, holder=holder, namespace=namespace, chain=chain)
        return admin_messages.stored_block_from_message(await self._ask(self._admin.ReadBlock, asked))

    async def write_block(self, holder: str, block: StoredBlock) -> str:
        """As HeadraceClient.write_block."""
        asked = encode(
            admin_pb2.StoredBlock,
            holder=holder,
            header=block.header,
            payload=block.payload,
            namespace_fields=block.namespace_fields,
        )
        return str((await self._ask(self._admin.WriteBlock, asked)).outcome)

    async def doctor(self, *, fix: bool = False) -> tuple[Finding, ...]:
        """As HeadraceClient.doctor."""
        asked = encode(admin_pb2.DoctorRequest, fix=fix)
        return admin_messages.findings_from_message(await self._ask(self._admin.Doctor, asked))

    async def pin(self, selector: Selector, *, for_s: float | None = None) -> tuple[ControlReport, ...]:
        """As HeadraceClient.pin."""
        asked = encode(admin_pb2.PinRequest, selector=admin_messages.selector_message(selector), for_s=for_s)
        return admin_messages.control_reports_from_message(await self._ask(self._admin.Pin, asked))

    async def unpin(self, selector: Selector) -> tuple[ControlReport, ...]:
        """As HeadraceClient.unpin."""
        asked = encode(admin_pb2.PinRequest, selector=admin_messages.selector_message(selector))
        return admin_messages.control_reports_from_message(await self._ask(self._admin.Unpin, asked))

    async def set_ttl(self, selector: Selector, *, ttl_s: float | None) -> tuple[ControlReport, ...]:
        """As HeadraceClient.set_ttl."""
        asked = encode(admin_pb2.SetTtlRequest, selector=admin_messages.selector_message(selector), ttl_s=ttl_s)
        return admin_messages.control_reports_from_message(await self._ask(self._admin.SetTtl, asked))

    async def list_tenants(self) -> TenantListing:
        """As HeadraceClient.list_tenants."""
        reply = await self._ask(self._admin.ListTenants, admin_pb2.ListTenantsRequest())
        return admin_messages.tenants_from_message(reply)

    async def set_quota(self, tenant: str, *, bytes_max: int | None, bytes_min: int = 0) -> QuotaChange:
        """As HeadraceClient.set_quota."""
        asked = encode(admin_pb2.SetQuotaRequest, tenant=tenant, bytes_max=bytes_max, bytes_min=bytes_min)
        return admin_messages.quota_change_from_message(await self._ask(self._admin.SetQuota, asked))

    async def reset_quota(self, tenant: str) -> QuotaChange:
        """As HeadraceClient.reset_quota."""
        asked = encode(admin_pb2.SetQuotaRequest, tenant=tenant, reset=True)
        return admin_messages.quota_change_from_message(await self._ask(self._admin.SetQuota, asked))

    async def drain_node(
        self, holder: str, *, undo: bool = False, without_moving: bool = False
    ) -> AsyncIterator[DrainProgress]:
        """As HeadraceClient.drain_node."""
        asked = encode(admin_pb2.DrainNodeRequest, holder=holder, undo=undo, without_moving=without_moving)
        call = self._admin.DrainNode(asked, timeout=DRAIN_CLIENT_TIMEOUT_MS / 1e3, metadata=self._target.metadata)
        try:
            async for message in call:
                yield admin_messages.drain_progress_from_message(message)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, target=self._target) from error
        finally:
            call.cancel()

    async def _ask(self, method: Callable[..., Any], request: object) -> Any:
        try:
            return await method(request, timeout=ADMIN_CLIENT_TIMEOUT_MS / 1e3, metadata=self._target.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, target=self._target) from error

    async def close(self) -> None:
        """Cancel every call under way and close the connection. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
