"""`headrace bench serve`: one load against one live system, from the choice of a workload to the figures.

Owns what a workload is called and how it is made to fit the model. Starts and stops nothing but its own connections.
"""

import asyncio
import math
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.bench.generate_load import LoadBounds, Report, generate_load
from headrace.bench.http_stream import HttpServer
from headrace.bench.planned_requests import (
    PlannedRequest,
    at_rate,
    plan_texts,
    plan_trace,
    read_texts,
    shape_prompts,
)
from headrace.bench.serving_report import LoadReport
from headrace.bench.serving_tally import LoadTally, Slo
from headrace.bench.serving_targets import ANY_USE, CacheUse, GrpcTarget, HttpTarget, LoadTarget
from headrace.client import Access, AsyncHeadraceClient, ServedModel
from headrace.core.clock import Deadline, SystemClock
from headrace.simulate import generate_trace as made
from headrace.simulate.read_trace import Trace, read_trace

# A server that does not say how long its contexts are (not all OpenAI-compatible ones do) gets prompts that fit here.
CONTEXT_TOKENS_ASSUMED = 2_048

# Requests a second where nothing else says it.
RATE_DEFAULT = 1.0

DESCRIBE_TIMEOUT_S = 10.0

# Of what is made up: prompts share it to within so many tokens, fewer than any block that is served.
MADE_BLOCK_TOKENS = 16

# What is made up: lengths for a context of a few thousand tokens, and second turns within a short measurement.
USUAL_SHAPE = ("prefixes=4", "prefix_tokens=512", "turn_tokens=128", "output_tokens=64", "turns=4", "gap_s=4")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent: a trace, a file of prompts, or, when neither is named, requests that are made up."""

    trace: Path | None = None
    prompts: Path | None = None
    kind: str = made.Workload.MULTI_TURN  # of what is made up
    shape: tuple[str, ...] = ()  # ... `name=value` over USUAL_SHAPE
    block_tokens: int | None = None  # of the trace; None: what fits its lengths
    rate: float | None = None  # None: the trace's own times, else RATE_DEFAULT
    seed: int = 0
    output_tokens_max: int = 64
    context_tokens_max: int | None = None  # prompts and outputs fit here; None: the context that the server has

    @property
    def name(self) -> str:
        """For reports."""
        named = self.trace or self.prompts
        return f"{'trace' if self.trace else 'prompts'} {named.name}" if named else f"{self.kind} requests"


@dataclass(frozen=True, slots=True)
class ServingEndpoint:
    """What is measured: a gRPC address of ours, or the base URL of an OpenAI-compatible server."""

    grpc_address: str = ""
    url: str = ""
    chat: bool = False  # over HTTP: chat completions instead of completions
    model: str = ""  # "": the only one
    access: Access = field(default_factory=Access)  # over HTTP: the API key of it
    cache: CacheUse = ANY_USE
    stops_at_eos: bool = False  # over HTTP: see HttpTarget

    @property
    def name(self) -> str:
        """For reports."""
        if not self.url:
            return f"{self.grpc_address} (gRPC)"
        return f"{HttpServer.of(self.url)} (HTTP, {'chat completions' if self.chat else 'completions'})"


def measure_serving(
    endpoint: ServingEndpoint, workload: Workload, *, bounds: LoadBounds, slo: Slo, report: Report
) -> LoadReport:
    """Send the workload and report what came back. Ctrl-C ends it early; what was measured until then is reported.

    Raises InvalidRequest for a workload that cannot be sent, UnknownModel, GatewayUnreachable.
    """
    return asyncio.run(measure_load(endpoint, workload, bounds=bounds, slo=slo, report=report))


async def measure_load(
    endpoint: ServingEndpoint, workload: Workload, *, bounds: LoadBounds, slo: Slo, report: Report
) -> LoadReport:
    """As `measure_serving`, on a loop that runs already."""
    clock, tally, stop = SystemClock(), LoadTally(slo), asyncio.Event()
    async with opened(endpoint) as (target, model):
        requests = plan_workload(workload, model, bounds=bounds, as_words=endpoint.chat, report=report)
        report(f"sending {workload.name} to {endpoint.name}, model {model.id}; Ctrl-C ends it and shows what there is")
        with _interrupting(stop.set):
            await generate_load(requests, target, bounds=bounds, tally=tally, stop=stop, clock=clock, report=report)
    return LoadReport(
        endpoint=endpoint.name, model=model.id, workload=workload.name, tally=tally, interrupted=stop.is_set()
    )


def plan_workload(
    workload: Workload, model: ServedModel, *, bounds: LoadBounds, as_words: bool, report: Report
) -> Iterator[PlannedRequest]:
    """The workload's requests, in a size that the model's context can hold."""
    if workload.prompts is not None:
        texts, rate = read_texts(workload.prompts), workload.rate or RATE_DEFAULT
        return plan_texts(texts, rate=rate, max_tokens=workload.output_tokens_max, seed=workload.seed)
    if workload.trace is not None:
        trace = read_trace(workload.trace, report=report, block_tokens=workload.block_tokens)
        chosen = at_rate(trace, workload.rate, requests_max=bounds.requests_max)
    else:
        trace = _make_trace(workload, bounds)
        # Conversations take a while until they overlap as they do later on: a short load would be too light.
        chosen = at_rate(trace, workload.rate or RATE_DEFAULT, requests_max=None)
    context_tokens_max = workload.context_tokens_max or model.context_tokens_max
    if not context_tokens_max:
        context_tokens_max = CONTEXT_TOKENS_ASSUMED
        report(f"the server does not say how long its contexts are: {context_tokens_max:,} tokens are taken for it")
    shape = shape_prompts(
        block_tokens=trace.block_tokens,
        prompt_tokens_max=max(request.input_tokens for request in chosen),
        context_tokens_max=context_tokens_max,
        output_tokens_max=workload.output_tokens_max,
        seed=workload.seed,
        as_words=as_words,
    )
    if shape.scale < 1:
        report(f"lengths are scaled by {shape.scale:.3f}: the longest then fits {context_tokens_max:,} tokens")
    return plan_trace(chosen, shape)


def _make_trace(workload: Workload, bounds: LoadBounds) -> Trace:
    """As many requests as are sent; where only a time bounds them, more than come in it."""
    rate = workload.rate or RATE_DEFAULT
    assert bounds.requests_max is not None or bounds.duration_s is not None, "what is made up has no end of its own"
    within = math.inf if bounds.duration_s is None else math.ceil(2 * rate * bounds.duration_s) + 100
    return made.generate_trace(
        made.Workload(workload.kind),
        requests=int(min(bounds.requests_max or math.inf, within)),
        seed=workload.seed,
        block_tokens=MADE_BLOCK_TOKENS,
        shape=made.parse_shape((*USUAL_SHAPE, *workload.shape, f"requests_per_s={rate}")),
    )


@asynccontextmanager
async def opened(endpoint: ServingEndpoint) -> AsyncIterator[tuple[LoadTarget, ServedModel]]:
    """The target and the model that it serves."""
    deadline = Deadline.after(DESCRIBE_TIMEOUT_S, SystemClock())
    if endpoint.url:
        server, api_key = HttpServer.of(endpoint.url), endpoint.access.get("api_key", "")
        async with deadline.scope("list the models"):
            model = await HttpTarget.find_model(server, endpoint.model, api_key=api_key)
        target = HttpTarget(
            server, model.id, chat=endpoint.chat, api_key=api_key, cache=endpoint.cache,
            stops_at_eos=endpoint.stops_at_eos,
        )  # fmt: skip
        yield target, model
        return
    async with AsyncHeadraceClient(endpoint.grpc_address, **endpoint.access) as client:
        async with deadline.scope("list the models"):
            model = await GrpcTarget.find_model(client, endpoint.model)
        yield GrpcTarget(client, model.id, cache=endpoint.cache), model


@contextmanager
def _interrupting(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C does this instead of raising, while the scope lasts."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
