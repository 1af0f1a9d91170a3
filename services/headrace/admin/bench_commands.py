"""`headrace bench`: what the data plane, routing and serving do on this machine, or on a live system."""

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

from headrace.admin.connection import access_of, address_option
from headrace.admin.output_file import PLOT_ENDINGS, OutputFile
from headrace.admin.prompt_options import model_option
from headrace.admin.selection import Duration
from headrace.admin.setting_flags import setting_options
from headrace.admin.system_commands import load_function
from headrace.admin.terminal import EXIT_INTERRUPTED, json_option, print_json, print_table, say
from headrace.config import load_config
from headrace.simulate.generate_trace import Workload

# How long requests come where nothing says how many.
DURATION_S_DEFAULT = 60.0


@click.group()
def bench() -> None:
    """Measure parts of the system, or a live one."""


@bench.command(short_help="Measure how fast cached blocks are read.")
@json_option
def fetch(*, as_json: bool) -> None:
    """Measure how fast cached blocks are read: memcpy, shared memory, raw TCP, gRPC and Redis GET, side by side.

    Takes about half a minute. Starts its own index and store node, reads runs of blocks of 64 KiB, 360 KiB, 1 MiB and
    4 MiB through each, compares every copy with what was stored, and ends what it started. All columns are measured in
    turn, so that other work on this machine hits them alike; rates are medians, in GB/s of 10^9 bytes.

    \b
    Examples:
      headrace bench fetch
      headrace bench fetch --json > fetch.json
    """
    measure_fetch = load_function("headrace.bench.measure_fetch:measure_fetch", command="bench", extra="all")
    show_report(measure_fetch(report=say), as_json=as_json)


@bench.command(short_help="Measure what routing costs a gateway.")
@json_option
def route(*, as_json: bool) -> None:
    """Measure what routing costs a gateway: hashing, lookup and choice, for prompts of 8,192 blocks.

    Takes about a quarter of a minute and needs no system. 64, 256 and 1,000 workers have parts of the prompts as
    docs/benchmarks.md says: most nothing or a common beginning, few all. Times are processor time; `plan` is the choice
    with everything that a gateway keeps of it.

    \b
    Examples:
      headrace bench route
      headrace bench route --json | jq '.rows[] | [.workers, .lookup_choose_us_p50]'
    """
    measure_routing = load_function(
        "headrace.bench.measure_routing:measure_routing", command="bench route", extra="store"
    )
    show_report(measure_routing(report=say), as_json=as_json)


def show_report(found: Any, *, as_json: bool) -> None:
    """Print a report: one JSON document, or its tables."""
    if as_json:
        print_json(found.as_json())
        return
    for title, columns, rows in found.tables():
        print_table(columns, rows, title=title)
        click.echo()


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what loads have in common; the command gets it as `bounds` and `slo`, beside `seed` and `max_tokens`."""

    @wraps(command)
    def with_load(*args: Any, **kwargs: Any) -> Any:
        names = ("requests_max", "duration_s", "timeout_s", "slo_ttft_ms", "slo_itl_ms")
        requests_max, duration_s, timeout_s, ttft_ms, itl_ms = (kwargs.pop(name) for name in names)
        load_bounds = load_function("headrace.bench.generate_load:LoadBounds", command="bench serve", extra="all")
        slo = load_function("headrace.bench.serving_tally:Slo", command="bench serve", extra="all")
        bounds = load_bounds(requests_max=requests_max, duration_s=duration_s, timeout_s=timeout_s)
        return command(*args, bounds=bounds, slo=slo(ttft_ms=ttft_ms, itl_ms=itl_ms), **kwargs)

    positive_ms = click.FloatRange(min=0, min_open=True)
    decorated: Callable[..., Any] = with_load
    for option in (
        click.option(
            "--slo-itl-ms", type=positive_ms, default=100.0, show_default=True, help="... and tokens within so many."
        ),
        click.option(
            "--slo-ttft-ms", type=positive_ms, default=2_000.0, show_default=True,
            help="Goodput counts answers whose first token comes within so many ms ...",
        ),
        click.option(
            "--timeout", "timeout_s", type=Duration(), default="2m", show_default=True, help="Of each request."
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts and times."),
        click.option(
            "--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Output tokens, at most."
        ),
        click.option("--duration", "duration_s", type=Duration(), help="Send for so long: 30s, 5m."),
        click.option("--requests", "requests_max", type=click.IntRange(min=1), help="Send so many, at most."),
    ):  # fmt: skip
        decorated = option(decorated)
    return decorated


def made_up_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what says which requests are made up; the command gets it as `generate` and `settings`."""
    for option in (
        click.option(
            "--set", "settings", multiple=True, metavar="NAME=VALUE",
            help="Of what is made up (docs/benchmarks.md); repeat.",
        ),
        click.option(
            "--generate", type=click.Choice([str(kind) for kind in Workload]), default=str(Workload.MULTI_TURN),
            show_default=True, help="Make requests of this kind up, where none are given.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@bench.command(short_help="Load a live system and measure its answers.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send this trace: JSON lines with timestamp, input_length, output_length and hash_ids.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send these prompts: a text file, one a line, or .jsonl with `prompt`.",
)
@made_up_options
@click.option("--block-tokens", type=click.IntRange(min=1), help="Of the trace. Default: what fits its lengths.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests a second. Default: the trace's own times, else 1.",
)
@load_options
@click.option("--url", default="", help="Send over HTTP to this OpenAI-compatible server, as http://127.0.0.1:8000.")
@click.option("--chat", is_flag=True, help="Over HTTP: as chat completions instead of completions.")
@click.option(
    "--stop-at-eos", is_flag=True,
    help="Over HTTP: let answers end where the model ends them, for servers that refuse ignore_eos.",
)  # fmt: skip
@click.option(
    "--context-tokens", type=click.IntRange(min=1),
    help="Scale prompts to fit so many with their outputs. Default: the context that the server says it has.",
)  # fmt: skip
@model_option
@click.option("--bypass", is_flag=True, help="Headrace: compute every prompt, whatever is cached, and leave nothing.")
@address_option
@json_option
@click.pass_context
def serve(
    context: click.Context,
    *,
    trace: Path | None,
    prompts: Path | None,
    generate: str,
    settings: tuple[str, ...],
    block_tokens: int | None,
    rate: float | None,
    seed: int,
    max_tokens: int,
    bounds: Any,
    slo: Any,
    url: str,
    chat: bool,
    stop_at_eos: bool,
    context_tokens: int | None,
    model: str,
    bypass: bool,
    address: str,
    as_json: bool,
) -> None:
    """Send requests at planned times, whatever becomes of the ones before, and report how they were answered.

    Without --trace and --prompts it makes requests up: conversations of several turns that share long system prompts.
    Prompts are made up from block ids, equal ids being equal tokens, in lengths that fit the model. Without --requests
    and --duration it sends for a minute (a trace: until its end). Ctrl-C ends it and shows what was measured. Formulas:
    docs/benchmarks.md.

    \b
    Examples:
      headrace bench serve --rate 4 --duration 30s
      headrace bench serve --trace conversation_trace.jsonl --requests 500 --rate 2 --json > load.json
      headrace bench serve --url http://10.0.0.5:8000 --context-tokens 4096 --rate 2 --slo-ttft-ms 500
    """
    if trace is not None and prompts is not None:
        raise click.UsageError("--trace and --prompts are two workloads; give one")
    if (chat or stop_at_eos) and not url:
        raise click.UsageError("--chat and --stop-at-eos are of the HTTP API; they need --url")
    measure, workload, endpoint, cache_use = (
        load_function(f"headrace.bench.{path}", command="bench serve", extra="all")
        for path in (
            "measure_serving:measure_serving",
            "measure_serving:Workload",
            "measure_serving:ServingEndpoint",
            "serving_targets:CacheUse",
        )
    )
    found = measure(
        endpoint(
            grpc_address=address,
            url=url,
            chat=chat,
            model=model,
            access=access_of(context),
            cache=cache_use(reads=not bypass, publishes=not bypass),
            stops_at_eos=stop_at_eos,
        ),
        workload(
            trace=trace,
            prompts=prompts,
            kind=generate,
            shape=settings,
            block_tokens=block_tokens,
            rate=rate,
            seed=seed,
            output_tokens_max=max_tokens,
            context_tokens_max=context_tokens,
        ),
        bounds=bounded(bounds) if trace is None else bounds,
        slo=slo,
        report=say,
    )
    show_report(found, as_json=as_json)
    for remark in found.remarks():
        say(remark)
    if found.interrupted:
        raise SystemExit(EXIT_INTERRUPTED)


def bounded(bounds: Any) -> Any:
    """Workloads without an end of their own need one."""
    if bounds.requests_max is None and bounds.duration_s is None:
        return type(bounds)(requests_max=None, duration_s=DURATION_S_DEFAULT, timeout_s=bounds.timeout_s)
    return bounds


@bench.command(short_help="What each optimisation adds: throughput and cost.")
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=click.FloatRange(min=0, min_open=True),
    default=(1.0,),
    show_default=True,
    help="Requests a second; repeat for a curve.",
)
@load_options
@click.option("--plot", type=OutputFile(PLOT_ENDINGS), help="Draw the curves into this PNG (or PDF, SVG).")
@setting_options("model", "engine", "store")
@json_option
def sweep(
    *,
    rates: tuple[float, ...],
    seed: int,
    max_tokens: int,
    bounds: Any,
    slo: Any,
    plot: Path | None,
    flags: dict[str, Any],
    config_file: str | None,
    as_json: bool,
) -> None:
    """Start one system after another on this machine, each with one optimisation more, and load each alike.

    No cache; a cache for each conversation alone; prefixes shared between conversations; decoding in batches; prefill
    on a worker of its own; int8 in the store. Every system has two workers. Throughput is of output tokens, cost is the
    processor time of all of a system's processes for 1,000 of them. Stops nothing that it did not start.

    \b
    Examples:
      headrace bench sweep --rate 1 --rate 2 --rate 4 --requests 60 --plot sweep.png
      headrace bench sweep --model ./tiny --requests 20 --json
    """
    sweep_optimisations, workload = (
        load_function(f"headrace.bench.{path}", command="bench sweep", extra="all")
        for path in ("sweep_optimisations:sweep_optimisations", "measure_serving:Workload")
    )
    plot_sweep: Callable[..., None] | None = None
    if plot is not None:  # what it lacks is said before anything is measured
        plot_sweep = load_function("headrace.bench.plot_sweep:plot_sweep", command="bench sweep --plot", extra="report")

    @contextmanager
    def start(settings: Mapping[str, Any]) -> Iterator[Any]:
        with local_system({**flags, **settings}, config_file) as system:
            yield system

    found = sweep_optimisations(
        start,
        workload=workload(seed=seed, output_tokens_max=max_tokens),
        rates=rates,
        bounds=bounded(bounds),
        slo=slo,
        report=say,
    )
    show_report(found, as_json=as_json)
    for remark in found.remarks():
        say(remark)
    if plot_sweep is not None and found.rows:
        plot_sweep(found, plot)
        say(f"plot: {plot}")


@contextmanager
def local_system(flags: Mapping[str, Any], config_file: str | None) -> Iterator[Any]:
    """A system of its own on free ports, started as `headrace up` starts one; it ends with the scope."""
    launch_local, down, processes_of, running = (
        load_function(path, command="bench sweep", extra="all")
        for path in (
            "headrace_cluster.launch_local:launch_local",
            "headrace_cluster.launch_local:down",
            "headrace_cluster.local_instance:processes_of",
            "headrace.bench.sweep_optimisations:RunningSystem",
        )
    )
    directory = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    # Nothing of a system that runs here already may be met, and no API key is asked for.
    own = {"state_dir": str(directory), "node_id": directory.name, "http_port": 0, "grpc_port": 0, "disk_gb": 0.0}
    # It is alone with its load on loopback, where no certificate is needed.
    own |= {"http_host": "127.0.0.1", "store_host": "127.0.0.1"}
    own |= {"tls_cert_file": "", "tls_key_file": "", "tls_ca_file": "", "tls_client_ca_file": ""}
    # The system is detached, so that who is told to end must end it, too.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        config = load_config({**flags, **own, "redis_url": "", "tenants_file": ""}, config_file=config_file)
        state = launch_local(config, report=say)
        try:
            yield running(
                grpc_address=state.grpc_target,
                process_ids=lambda: processes_of(state.instance_id),
                redis_url=state.redis_url,
            )
        finally:
            down(directory, report=say)
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(directory, ignore_errors=True)
