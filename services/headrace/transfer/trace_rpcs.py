"""A store node's calls as spans, for those that come from a traced request; and their request, for log lines.

Only calls that carry a trace are touched: look-ups of the background, releases and health checks make no spans.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from headrace.telemetry.request_context import TRACEPARENT, RequestContext, incoming_context, within
from headrace.telemetry.tracing import SpanKind, Tracing

Behaviour = Callable[[Any, Any], Any]


class TracedRpcs(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """For a grpc.aio server: a span around each call that names the span that it was made in."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The handler that serves the call, None for a method that nobody serves."""
        handler = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata
        if handler is None or not any(key == TRACEPARENT for key, _ in metadata or ()):
            return handler
        side = "_".join(
            "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
        )
        behaviour = getattr(handler, side)
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        caller, method = incoming_context(metadata), handler_call_details.method.removeprefix("/")
        return handler._replace(**{side: self._traced(behaviour, method, caller)})

    def _traced(self, behaviour: Behaviour, method: str, caller: RequestContext) -> Behaviour:
        async def answer(request: Any, context: Any) -> Any:
            named = {"rpc.system.name": "grpc", "rpc.method": method}
            span = self._tracing.start(method, kind=SpanKind.SERVER, attributes=named, under=caller)
            with span.ended(), within(span.context):
                try:
                    reply = await behaviour(request, context)
                except grpc.aio.AbortError:
                    span.set({"rpc.response.status_code": context.code().name})
                    raise
                span.set({"rpc.response.status_code": grpc.StatusCode.OK.name})
                return reply

        return answer
