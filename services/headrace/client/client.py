"""The blocking client: one gateway over gRPC. `async_client.py` has the same methods over asyncio.

It needs grpcio and protobuf only. Every call has a deadline; a server's error arrives as the class that the server
raised (`core/errors.py`); leaving a stream or closing the client cancels what is under way, on the workers too.

    with HeadraceClient("127.0.0.1:9000") as client:
        for event in client.stream("Once upon a time"):
            ...
        result = client.generate([Message("user", "Hello")], sampling=Sampling(max_tokens=64))
        print(result.text, result.usage.cached.by_source(), result.ttft_ms)

It knows neither HTTP, Ray nor how the gateway chooses.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

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
from headrace.core.generation import ControlReport, EvictReport, HolderStat
from headrace.core.limits import ADMIN_CLIENT_TIMEOUT_MS, DRAIN_CLIENT_TIMEOUT_MS
from headrace.transfer.channels import open_blocking_channel
from headrace.wire.v1 import admin_pb2, inference_pb2
from headrace.wire.v1.admin_pb2_grpc import CacheAdminStub
from headrace.wire.v1.inference_pb2_grpc import InferenceStub

Value = TypeVar("Value")


class GenerateStream:
    """Events of one request as they arrive; a context manager. Closing it (or leaving it early) cancels the request."""

    def __init__(self, call: Any, *, target: Target, started_s: float) -> None:
        self._call = call
        self._target = target
        self._collector = ResultCollector(started_s=started_s)

    def __iter__(self) -> Iterator[Event]:
        """Yield Accepted, then TokenDelta for each token, then Done. Raises the server's typed error."""
        try:
            for message in self._call:
                event = messages.event_from_message(message)
                if event is not None:
                    self._collector.add(event, now_s=time.monotonic())
                    yield event
        except grpc.RpcError as error:
            raise error_from_rpc(error, target=self._target) from error
        finally:
            self.close()

    def result(self) -> GenerateResult:
        """Read what is left of the stream and return the whole."""
        for _ in self:
            pass
        return self._collector.result(now_s=time.monotonic())

    def close(self) -> None:
        """Cancel what is under way. Idempotent; harmless after the end."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HeadraceClient:
    """Blocking client of one gateway. Safe to use from several threads. Close it, or use it as a context manager."""

    def __init__(self, address: str, **access: Unpack[Access]) -> None:
        """address: `host:port`. access: API key, application and files of TLS, as `Access` says.

        Connects on first use. Raises InvalidRequest for what cannot be a key or a name, ConfigInvalid for a file that
        cannot be used."""
        self.address = address
        self._target = target_of(address, **access)
        with messages.refusing_unencodable():
            self._channel = open_blocking_channel(address, tls=self._target.tls, options=CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin = CacheAdminStub(self._channel)  # type: ignore[no-untyped-call]

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> GenerateStream:
        """Start a request. options: model, sampling, cache, timeout_s, cache_salt, priority, as `RequestOptions` says.

        Raises InvalidRequest at once for what cannot be sent; the server's errors are raised while iterating."""
        call = prepare_call(prompt, **options)
        started_s = time.monotonic()
        events = self._inference.Generate(call.request, timeout=call.timeout_s, metadata=self._target.metadata)
        return GenerateStream(events, target=self._target, started_s=started_s)

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> GenerateResult:
        """Run a request to its end and return the whole."""
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def list_models(self) -> tuple[ServedModel, ...]:
        """Models that can be asked for."""
        return messages.models_from_message(self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest()))

    def status(self) -> SystemStatus:
        """Live store nodes and workers."""
        return admin_messages.status_from_message(self._ask(self._admin.Status, admin_pb2.StatusRequest()))

    def stat(self) -> tuple[HolderStat, ...]:
        """Every holder's books."""
        return admin_messages.stats_from_message(self._ask(self._admin.Stat, admin_pb2.StatRequest()))

    def list_blocks(self, selector: Selector = EVERYTHING, *, with_text: bool = False, limit: int = 0) -> BlockListing:
        """Cached blocks, with their text when asked for. limit 0: the server's bound."""
        selected = admin_messages.selector_message(selector)
        asked = encode(admin_pb2.ListBlocksRequest, selector=selected, with_text=with_text, limit=limit)
        return admin_messages.listing_from_message(self._ask(self._admin.ListBlocks, asked))

    def evict(self, selector: Selector, *, dry_run: bool = True) -> tuple[EvictReport, ...]:
        """Evict (dry: count) what the selector means, over all holders. A report with an error did not answer."""
        return self.price_eviction(selector, dry_run=dry_run).reports

    def price_eviction(self, selector: Selector, *, dry_run: bool = True, tokens_per_s: float = 0.0) -> Eviction:
        """As evict, with what it loses. tokens_per_s: how fast prompts are computed; 0: as the gateway measured it."""
        selected = admin_messages.selector_message(selector)
        asked = encode(admin_pb2.EvictRequest, selector=selected, dry_run=dry_run, tokens_per_s=tokens_per_s)
        return admin_messages.eviction_from_message(self._ask(self._admin.Evict, asked))

    def why_miss(
        self, prompt: Prompt | None = None, *, model: str = "", request_id: str = "", cache_salt: str = ""
    ) -> MissExplanation:
        """Why a prompt (or a request that the gateway served lately, by its id) is not all in the cache now."""
        asked = admin_messages.why_miss_message(prompt, model=model, request_id=request_id, cache_salt=cache_salt)
        return admin_messages.explanation_from_message(self._ask(self._admin.WhyMiss, asked))

    def explain_route(self, request_id: str) -> RouteExplanation:
        """Why a request that the gateway placed lately went where it went, and what in fact happened."""
        asked = encode(admin_pb2.ExplainRouteRequest, request_id=request_id)
        return admin_messages.route_explanation_from_message(self._ask(self._admin.ExplainRoute, asked))

    def read_block(self, holder: str, *, namespace: str, chain: Sequence[bytes]) -> StoredBlock:
        """The last block of a chain from one node (`node:ID`)."""
        asked = encode(admin_pb2.ReadBlockRequest, holder=holder, namespace=namespace, chain=chain)
        return admin_messages.stored_block_from_message(self._ask(self._admin.ReadBlock, asked))

    def write_block(self, holder: str, block: StoredBlock) -> str:
        """Store one block on a node; "stored", "already stored" or "no room"."""
        asked = encode(
            admin_pb2.StoredBlock,
            holder=holder,
            header=block.header,
            payload=block.payload,
            namespace_fields=block.namespace_fields,
        )
        return str(self._ask(self._admin.WriteBlock, asked).outcome)

    def doctor(self, *, fix: bool = False) -> tuple[Finding, ...]:
        """Examine the system; with fix, also repair what can be repaired from here."""
        asked = encode(admin_pb2.DoctorRequest, fix=fix)
        return admin_messages.findings_from_message(self._ask(self._admin.Doctor, asked))

    def pin(self, selector: Selector, *, for_s: float | None = None) -> tuple[ControlReport, ...]:
        """Keep the last full block of the selected prefix (or the blocks named by hash) and all before it, on every
        node that holds it. for_s None: until it is unpinned. A refusal is a report and no error."""
        asked = encode(admin_pb2.PinRequest, selector=admin_messages.selector_message(selector), for_s=for_s)
        return admin_messages.control_reports_from_message(self._ask(self._admin.Pin, asked))

    def unpin(self, selector: Selector) -> tuple[ControlReport, ...]:
        """Take a pin back on every node."""
        asked = encode(admin_pb2.PinRequest, selector=admin_messages.selector_message(selector))
        return admin_messages.control_reports_from_message(self._ask(self._admin.Unpin, asked))

    def set_ttl(self, selector: Selector, *, ttl_s: float | None) -> tuple[ControlReport, ...]:
        """Have the selected blocks and all that stand on them go ttl_s from now; None takes an earlier order back."""
        asked = encode(admin_pb2.SetTtlRequest, selector=admin_messages.selector_message(selector), ttl_s=ttl_s)
        return admin_messages.control_reports_from_message(self._ask(self._admin.SetTtl, asked))

    def list_tenants(self) -> TenantListing:
        """Tenants, their budgets, and what they have on each node."""
        return admin_messages.tenants_from_message(self._ask(self._admin.ListTenants, admin_pb2.ListTenantsRequest()))

    def set_quota(self, tenant: str, *, bytes_max: int | None, bytes_min: int = 0) -> QuotaChange:
        """Give a tenant's trust group a quota (None: none) and a protected minimum, in bytes on each node."""
        asked = encode(admin_pb2.SetQuotaRequest, tenant=tenant, bytes_max=bytes_max, bytes_min=bytes_min)
        return admin_messages.quota_change_from_message(self._ask(self._admin.SetQuota, asked))

    def reset_quota(self, tenant: str) -> QuotaChange:
        """Give a tenant's trust group back the budget that the tenants file has."""
        asked = encode(admin_pb2.SetQuotaRequest, tenant=tenant, reset=True)
        return admin_messages.quota_change_from_message(self._ask(self._admin.SetQuota, asked))

    def drain_node(self, holder: str, *, undo: bool = False, without_moving: bool = False) -> Iterator[DrainProgress]:
        """Have a node (`node:ID`) take no new blocks and hand its hot ones to peers; undo: have it take blocks again.

        Starts with the first `next`; yields how far it is, last with `done`. Leaving early cancels the call.
        """
        asked = encode(admin_pb2.DrainNodeRequest, holder=holder, undo=undo, without_moving=without_moving)
        call = self._admin.DrainNode(asked, timeout=DRAIN_CLIENT_TIMEOUT_MS / 1e3, metadata=self._target.metadata)
        try:
            for message in call:
                yield admin_messages.drain_progress_from_message(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error, target=self._target) from error
        finally:
            call.cancel()

    def _ask(self, method: Callable[..., Value], request: object) -> Value:
        try:
            return method(request, timeout=ADMIN_CLIENT_TIMEOUT_MS / 1e3, metadata=self._target.metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, target=self._target) from error

    def close(self) -> None:
        """Cancel every call under way and close the connection. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
