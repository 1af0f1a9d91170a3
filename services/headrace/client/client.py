"""The clients: one over blocking gRPC, one over asyncio, with the same methods.

They need grpcio and protobuf only. Every call has a deadline; a server's error arrives as the class that the server
raised (`core/errors.py`); leaving a stream or closing the client cancels what is under way, on the workers too.

    with HeadraceClient("127.0.0.1:9000") as client:
        for event in client.stream("Once upon a time"):
            ...
        result = client.generate([Message("user", "Hello")], sampling=Sampling(max_tokens=64))
        print(result.text, result.usage.cached.by_source(), result.ttft_ms)

Neither knows HTTP, Ray or how the gateway chooses.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from headrace.client import messages
from headrace.client.errors import error_from_rpc
from headrace.client.values import (
    BlockListing,
    CacheOptions,
    Event,
    Eviction,
    Finding,
    GenerateResult,
    MissExplanation,
    Prompt,
    ResultCollector,
    Sampling,
    Selector,
    ServedModel,
    StoredBlock,
    SystemStatus,
)
from headrace.core.errors import InvalidRequest, WorkerUnavailable
from headrace.core.generation import EvictReport, HolderStat
from headrace.core.limits import (
    ADMIN_CALL_TIMEOUT_MS,
    CLIENT_DEADLINE_GRACE_MS,
    GRPC_MESSAGE_BYTES_MAX,
    REQUEST_TIMEOUT_MS_DEFAULT,
)
from headrace.core.tenants import is_usable_key
from headrace.wire.v1 import admin_pb2, inference_pb2
from headrace.wire.v1.admin_pb2_grpc import CacheAdminStub
from headrace.wire.v1.inference_pb2_grpc import InferenceStub

Value = TypeVar("Value")

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES_MAX),
    # A client that outlives a restart of the gateway must find it again within seconds, not after minutes of back-off.
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
EVERYTHING = Selector()
ANY_SAMPLING = Sampling()
ANY_CACHE = CacheOptions()


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """One generate call: the message, and its deadline in seconds."""

    request: inference_pb2.GenerateRequest
    timeout_s: float


def prepare_call(
    prompt: Prompt, *, model: str, sampling: Sampling, cache: CacheOptions, timeout_s: float | None, cache_salt: str
) -> PreparedCall:
    """Encode a call. The server gets the caller's time; the transport a little more, so that the server's own typed
    answer at the deadline still arrives."""
    timeout_ms = REQUEST_TIMEOUT_MS_DEFAULT if timeout_s is None else max(1, round(timeout_s * 1e3))
    request = messages.generate_request_message(
        prompt, model=model, sampling=sampling, cache=cache, timeout_ms=timeout_ms, cache_salt=cache_salt
    )
    return PreparedCall(request=request, timeout_s=(timeout_ms + CLIENT_DEADLINE_GRACE_MS) / 1e3)


def call_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """What goes with every call: the API key, as HTTP clients send it; nothing without one."""
    if api_key and not is_usable_key(api_key):
        raise InvalidRequest(
            "this is no API key: keys are 20 or more signs of printable ASCII, without spaces", param="api_key"
        )
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class GenerateStream:
    """Events of one request as they arrive; a context manager. Closing it (or leaving it early) cancels the request."""

    def __init__(self, call: Any, *, address: str, started_s: float) -> None:
        self._call = call
        self._address = address
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
            raise error_from_rpc(error, address=self._address) from error
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

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str = "") -> None:
        """address: `host:port`. credentials: TLS; None for plain text. api_key: who calls, where the deployment has
        tenants; goes with every call. Connects on first use. Raises InvalidRequest for what cannot be a key."""
        self.address = address
        self._metadata = call_metadata(api_key)
        self._channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        )
        self._inference = InferenceStub(self._channel)
        self._admin = CacheAdminStub(self._channel)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: Sampling = ANY_SAMPLING,
        cache: CacheOptions = ANY_CACHE,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> GenerateStream:
        """Start a request. `model` may be left out when one is served. Raises InvalidRequest at once for what cannot
        be sent; the server's errors are raised while iterating."""
        call = prepare_call(
            prompt, model=model, sampling=sampling, cache=cache, timeout_s=timeout_s, cache_salt=cache_salt
        )
        started_s = time.monotonic()
        events = self._inference.Generate(call.request, timeout=call.timeout_s, metadata=self._metadata)
        return GenerateStream(events, address=self.address, started_s=started_s)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: Sampling = ANY_SAMPLING,
        cache: CacheOptions = ANY_CACHE,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> GenerateResult:
        """Run a request to its end and return the whole."""
        with self.stream(
            prompt, model=model, sampling=sampling, cache=cache, timeout_s=timeout_s, cache_salt=cache_salt
        ) as stream:
            return stream.result()

    def list_models(self) -> tuple[ServedModel, ...]:
        """Models that can be asked for."""
        return messages.models_from_message(self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest()))

    def status(self) -> SystemStatus:
        """Live store nodes and workers."""
        return messages.status_from_message(self._ask(self._admin.Status, admin_pb2.StatusRequest()))

    def stat(self) -> tuple[HolderStat, ...]:
        """Every holder's books."""
        return messages.stats_from_message(self._ask(self._admin.Stat, admin_pb2.StatRequest()))

    def list_blocks(self, selector: Selector = EVERYTHING, *, with_text: bool = False, limit: int = 0) -> BlockListing:
        """Cached blocks, with their text when asked for. limit 0: the server's bound."""
        request = admin_pb2.ListBlocksRequest(
            selector=messages.selector_message(selector), with_text=with_text, limit=limit
        )
        return messages.listing_from_message(self._ask(self._admin.ListBlocks, request))

    def evict(self, selector: Selector, *, dry_run: bool = True) -> tuple[EvictReport, ...]:
        """Evict (dry: count) what the selector means, over all holders. A report with an error did not answer."""
        return (self.price_eviction(selector, dry_run=dry_run)).reports

    def price_eviction(self, selector: Selector, *, dry_run: bool = True, tokens_per_s: float = 0.0) -> Eviction:
        """As evict, with what it loses. tokens_per_s: how fast prompts are computed; 0: as the gateway measured it."""
        request = admin_pb2.EvictRequest(
            selector=messages.selector_message(selector), dry_run=dry_run, tokens_per_s=tokens_per_s
        )
        return messages.eviction_from_message(self._ask(self._admin.Evict, request))

    def why_miss(
        self, prompt: Prompt | None = None, *, model: str = "", request_id: str = "", cache_salt: str = ""
    ) -> MissExplanation:
        """Why a prompt (or a request that the gateway served lately, by its id) is not all in the cache now."""
        asked = messages.why_miss_message(prompt, model=model, request_id=request_id, cache_salt=cache_salt)
        return messages.explanation_from_message(self._ask(self._admin.WhyMiss, asked))

    def read_block(self, holder: str, *, namespace: str, chain: Sequence[bytes]) -> StoredBlock:
        """The last block of a chain from one node (`node:ID`)."""
        asked = admin_pb2.ReadBlockRequest(holder=holder, namespace=namespace, chain=chain)
        return messages.stored_block_from_message(self._ask(self._admin.ReadBlock, asked))

    def write_block(self, holder: str, block: StoredBlock) -> str:
        """Store one block on a node; "stored", "already stored" or "no room"."""
        reply = self._ask(self._admin.WriteBlock, messages.stored_block_message(block, holder=holder))
        return str(reply.outcome)

    def doctor(self, *, fix: bool = False) -> tuple[Finding, ...]:
        """Examine the system; with fix, also repair what can be repaired from here."""
        return messages.findings_from_message(self._ask(self._admin.Doctor, admin_pb2.DoctorRequest(fix=fix)))

    def _ask(self, method: Callable[..., Value], request: object) -> Value:
        try:
            return method(request, timeout=ADMIN_CALL_TIMEOUT_MS / 1e3, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, address=self.address) from error

    def close(self) -> None:
        """Cancel every call under way and close the connection. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncGenerateStream:
    """As GenerateStream, for asyncio. Cancelling the task that iterates cancels the request."""

    def __init__(self, call: Any, *, address: str, started_s: float) -> None:
        self._call = call
        self._address = address
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
            raise error_from_rpc(error, address=self._address) from error
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

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str = "") -> None:
        """address: `host:port`. credentials: TLS; None for plain text. api_key: who calls, where the deployment has
        tenants; goes with every call. Connects on first use. Raises InvalidRequest for what cannot be a key."""
        self.address = address
        self._metadata = call_metadata(api_key)
        self._channel = (
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        )
        self._inference = InferenceStub(self._channel)
        self._admin = CacheAdminStub(self._channel)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: Sampling = ANY_SAMPLING,
        cache: CacheOptions = ANY_CACHE,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerateStream:
        """As HeadraceClient.stream."""
        call = prepare_call(
            prompt, model=model, sampling=sampling, cache=cache, timeout_s=timeout_s, cache_salt=cache_salt
        )
        started_s = time.monotonic()
        events = self._inference.Generate(call.request, timeout=call.timeout_s, metadata=self._metadata)
        return AsyncGenerateStream(events, address=self.address, started_s=started_s)

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: Sampling = ANY_SAMPLING,
        cache: CacheOptions = ANY_CACHE,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> GenerateResult:
        """As HeadraceClient.generate."""
        async with self.stream(
            prompt, model=model, sampling=sampling, cache=cache, timeout_s=timeout_s, cache_salt=cache_salt
        ) as stream:
            return await stream.result()

    async def list_models(self) -> tuple[ServedModel, ...]:
        """As HeadraceClient.list_models."""
        reply = await self._ask(self._inference.ListModels, inference_pb2.ListModelsRequest())
        return messages.models_from_message(reply)

    async def status(self) -> SystemStatus:
        """As HeadraceClient.status."""
        return messages.status_from_message(await self._ask(self._admin.Status, admin_pb2.StatusRequest()))

    async def stat(self) -> tuple[HolderStat, ...]:
        """As HeadraceClient.stat."""
        return messages.stats_from_message(await self._ask(self._admin.Stat, admin_pb2.StatRequest()))

    async def list_blocks(
        self, selector: Selector = EVERYTHING, *, with_text: bool = False, limit: int = 0
    ) -> BlockListing:
        """As HeadraceClient.list_blocks."""
        request = admin_pb2.ListBlocksRequest(
            selector=messages.selector_message(selector), with_text=with_text, limit=limit
        )
        return messages.listing_from_message(await self._ask(self._admin.ListBlocks, request))

    async def evict(self, selector: Selector, *, dry_run: bool = True) -> tuple[EvictReport, ...]:
        """As HeadraceClient.evict."""
        return (await self.price_eviction(selector, dry_run=dry_run)).reports

    async def price_eviction(self, selector: Selector, *, dry_run: bool = True, tokens_per_s: float = 0.0) -> Eviction:
        """As HeadraceClient.price_eviction."""
        request = admin_pb2.EvictRequest(
            selector=messages.selector_message(selector), dry_run=dry_run, tokens_per_s=tokens_per_s
        )
        return messages.eviction_from_message(await self._ask(self._admin.Evict, request))

    async def why_miss(
        self, prompt: Prompt | None = None, *, model: str = "", request_id: str = "", cache_salt: str = ""
    ) -> MissExplanation:
        """As HeadraceClient.why_miss."""
        asked = messages.why_miss_message(prompt, model=model, request_id=request_id, cache_salt=cache_salt)
        return messages.explanation_from_message(await self._ask(self._admin.WhyMiss, asked))

    async def read_block(self, holder: str, *, namespace: str, chain: Sequence[bytes]) -> StoredBlock:
        """As HeadraceClient.read_block."""
        asked = admin_pb2.ReadBlockRequest(holder=holder, namespace=namespace, chain=chain)
        return messages.stored_block_from_message(await self._ask(self._admin.ReadBlock, asked))

    async def write_block(self, holder: str, block: StoredBlock) -> str:
        """As HeadraceClient.write_block."""
        reply = await self._ask(self._admin.WriteBlock, messages.stored_block_message(block, holder=holder))
        return str(reply.outcome)

    async def doctor(self, *, fix: bool = False) -> tuple[Finding, ...]:
        """As HeadraceClient.doctor."""
        return messages.findings_from_message(await self._ask(self._admin.Doctor, admin_pb2.DoctorRequest(fix=fix)))

    async def _ask(self, method: Callable[..., Any], request: object) -> Any:
        try:
            return await method(request, timeout=ADMIN_CALL_TIMEOUT_MS / 1e3, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, address=self.address) from error

    async def close(self) -> None:
        """Cancel every call under way and close the connection. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
