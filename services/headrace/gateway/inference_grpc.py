"""The Inference service over protobuf messages, and the standard health service.

Methods are named as the RPCs and take `(request, grpc_context)`, so that a Ray Serve deployment can expose them as its
own and a plain grpc.aio server can register them (`serve_grpc.py`). How an error reaches the caller differs between the
two and is passed in.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from grpc_health.v1 import health_pb2

from headrace.core.errors import Overloaded
from headrace.core.front_door_limits import HEALTH_WATCHES_MAX
from headrace.core.limits import HEALTH_WATCH_MS, RETRY_AFTER_MS
from headrace.gateway.accepted import Accepted
from headrace.gateway.authenticate import authorization_of
from headrace.gateway.refuse_call import RefuseCall, telling
from headrace.gateway.route_request import ChoiceFinished, ChoiceToken
from headrace.gateway.service import GatewayEvent, GatewayService
from headrace.telemetry.request_context import TRACEPARENT, within_callers_trace
from headrace.wire.parse import parse_generate_request
from headrace.wire.render import render_accepted, render_done, render_model, render_token
from headrace.wire.status import UnknownService
from headrace.wire.v1 import inference_pb2

HEALTH_SERVICES = ("", "headrace.v1.Inference", "headrace.v1.CacheAdmin")


class InferenceRpc:
    """headrace.v1.Inference over one service."""

    def __init__(self, service: GatewayService, *, refuse: RefuseCall) -> None:
        self._service = service
        self._refuse_begun = refuse
        self._refuse = telling(refuse, service.call_refused)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, grpc_context: Any
    ) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        """One request in, Accepted, tokens and Done out. Cancelling the call ends the work on the worker."""
        refuse = self._refuse
        try:
            tenant = self._service.authenticate(authorization_of(grpc_context))
            events = self._service.generate(parse_generate_request(request), tenant)
            traceparent = dict(grpc_context.invocation_metadata() or ()).get(TRACEPARENT)
            async with aclosing(within_callers_trace(traceparent, events)) as steps:
                async for event in steps:
                    yield _render(event)
                    refuse = self._refuse_begun
        except Exception as error:
            await refuse(grpc_context, error)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, grpc_context: Any
    ) -> inference_pb2.ListModelsReply:
        """Models that are served now, each with the namespace of the caller's own trust group."""
        try:
            tenant = self._service.authenticate(authorization_of(grpc_context))
        except Exception as error:
            await self._refuse(grpc_context, error)
        return inference_pb2.ListModelsReply(
            models=[
                render_model(
                    served.name,
                    context_tokens_max=served.tokens_max,
                    block_tokens=served.namespace.layout.block_tokens,
                    namespace=served.namespace.narrowed("", trust_group=tenant.trust_group).id,
                )
                for served in self._service.models()
            ]
        )


def _render(event: GatewayEvent) -> inference_pb2.GenerateEvent:
    match event:
        case Accepted(request_id=request_id, model=model):
            return render_accepted(request_id, model)
        case ChoiceToken(delta=delta):
            return render_token(delta)
        case ChoiceFinished(finished=finished, prefill_worker=prefill_worker):
            return render_done(finished, prefill_worker)


class HealthRpc:
    """grpc.health.v1.Health: SERVING means that a generation request could be served now."""

    def __init__(self, service: GatewayService, *, refuse: RefuseCall) -> None:
        self._service = service
        self._refuse = telling(refuse, service.call_refused)
        self._num_watches = 0

    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Any) -> health_pb2.HealthCheckResponse:
        """The state now; NOT_FOUND for a service that is not served here."""
        if request.service not in HEALTH_SERVICES:
            await self._refuse(grpc_context, UnknownService(f"no service {request.service[:200]!r} here"))
        return self._response(request.service)

    async def List(self, request: health_pb2.HealthListRequest, grpc_context: Any) -> health_pb2.HealthListResponse:
        """The state of every service."""
        return health_pb2.HealthListResponse(statuses={name: self._response(name) for name in HEALTH_SERVICES})

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Any
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """The state now and whenever it changes, until the caller leaves. Refused beyond HEALTH_WATCHES_MAX at once."""
        if self._num_watches >= HEALTH_WATCHES_MAX:
            await self._refuse(grpc_context, Overloaded("too many watch this", retry_after_ms=RETRY_AFTER_MS))
        self._num_watches += 1
        try:
            told = None
            while True:
                response = self._response(request.service)
                if response.status != told:
                    told = response.status
                    yield response
                await asyncio.sleep(HEALTH_WATCH_MS / 1000)
        finally:
            self._num_watches -= 1

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in HEALTH_SERVICES:
            status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        elif self._service.ready():
            status = health_pb2.HealthCheckResponse.SERVING
        else:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)
