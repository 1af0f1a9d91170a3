"""A client's request as one span, with what was decided, predicted and measured for it; and its id for log lines.

Owns what of a request may be seen outside: numbers and names of parts, never its text. Where tracing is off, all that
is left is that each step runs within the request, so that what is logged in it names it.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from headrace.gateway.accepted import Accepted
from headrace.gateway.recent_decisions import DecidedRequest, RecentDecisions
from headrace.gateway.route_request import ChoiceEvent, ChoiceFinished
from headrace.telemetry.request_context import current, within
from headrace.telemetry.traced_ports import finished_attributes
from headrace.telemetry.tracing import Span, SpanKind, Tracing, Value, outcome_of
from headrace.wire.client_request import ChatPrompt, ClientRequest


async def trace_request(
    request: ClientRequest,
    events: AsyncGenerator[Accepted | ChoiceEvent, None],
    *,
    tracing: Tracing | None,
    decisions: RecentDecisions,
) -> AsyncGenerator[Accepted | ChoiceEvent, None]:
    """The request's events, each step of them within the request and under its span. Closing this closes them."""
    watched = None if tracing is None else _Watched(request, tracing)
    context = current() if watched is None else watched.span.context
    with nullcontext() if watched is None else watched.until_ended(decisions):
        try:
            while True:
                with within(context):
                    event = await anext(events, None)
                if event is None:
                    return
                if isinstance(event, Accepted):
                    context = replace(context, request_id=event.request_id)
                if watched is not None:
                    watched.see(event)
                yield event
        finally:
            with within(context):
                await events.aclose()


class _Watched:
    """The span of one request, and what has been seen of it."""

    def __init__(self, request: ClientRequest, tracing: Tracing) -> None:
        self._operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        self._request_id = ""
        self._unfinished = request.choices
        self._output_tokens = 0
        named: dict[str, Value] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.choice.count": request.choices,
            "gen_ai.request.temperature": request.sampling.temperature,
        }
        if request.model:
            named["gen_ai.request.model"] = request.model
        if request.sampling.max_tokens is not None:
            named["gen_ai.request.max_tokens"] = request.sampling.max_tokens
        self.span: Span = tracing.start(self._operation, kind=SpanKind.SERVER, attributes=named, begins=True)

    def see(self, event: Accepted | ChoiceEvent) -> None:
        """One event is passed on."""
        match event:
            case Accepted(request_id=request_id, model=model):
                self._request_id = request_id
                self.span.rename(f"{self._operation} {model}")
                named = {"headrace.request.id": request_id, "gen_ai.response.id": request_id}
                self.span.set(named | {"gen_ai.request.model": model, "gen_ai.response.model": model})
            case ChoiceFinished(finished=finished):
                self._unfinished -= 1
                self._output_tokens += finished.usage.completion_tokens
                if event.choice == 0:
                    self.span.set(finished_attributes(finished))
                self.span.set({"gen_ai.usage.output_tokens": self._output_tokens})

    @contextmanager
    def until_ended(self, decisions: RecentDecisions) -> Iterator[None]:
        """End the span with the scope, with how the request ended and what was decided for it."""
        with self.span.ended():
            outcome = "cancelled"
            try:
                yield
                outcome = "finished"
            except Exception as error:
                outcome = outcome_of(error)
                raise
            finally:
                # A client may leave when it has all that it waits for.
                self.span.set({"headrace.outcome": outcome if self._unfinished else "finished"})
                decided = decisions.find(self._request_id)
                if decided is not None:
                    self.span.set(_decided_attributes(decided))


def _decided_attributes(decided: DecidedRequest) -> dict[str, Value]:
    named: dict[str, Value] = {
        "headrace.decision.reason": decided.reason.value,
        "headrace.decision.attempts": decided.attempts,
        "headrace.decision.predicted_ttft_seconds": decided.predicted_ttft_s,
    }
    if decided.ttft_s is not None:
        named["gen_ai.response.time_to_first_chunk"] = decided.ttft_s
    return named
