"""`headrace simulate ...`: replay a trace through the policies that stores and gateways run. Needs no system."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from headrace.admin.output_file import PLOT_ENDINGS, OutputFile
from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, print_json, print_table, say
from headrace.admin.trace_options import TraceOptions, trace_options
from headrace.core.errors import InvalidRequest
from headrace.simulate.generate_trace import write_trace
from headrace.simulate.read_trace import Trace
from headrace.simulate.replay_eviction import replay_eviction

# What the public traces have.
TICK_S_OF_FILES = 3.0
LOADS_DEFAULT = (0.9,)


@click.command(short_help="Replay requests through eviction policies or routers.")
@click.option("--eviction", is_flag=True, help="Compare the eviction policies and the bound.")
@click.option("--cluster", help="Compare routers on this cluster: a profile's name or a YAML file.")
@click.option("--write", type=OutputFile(), help="Write the requests as JSON lines.")
@trace_options
@click.option("--policy", "policies", multiple=True, help="Routers, by name; repeat for several. Default: all.")
@click.option(
    "--load", "loads", multiple=True, type=click.FloatRange(0, 10),
    help="Cold prefill work over what the workers can do; 0: the trace's own times. Repeat for several. Default: 0.9.",
)  # fmt: skip
@click.option(
    "--tick-s", type=click.FloatRange(min=0),
    help="Arrivals are spread over so long at random: the tick of the trace's clock. 3 for a file, 0 for what is made.",
)  # fmt: skip
@click.option("--plot", type=OutputFile(PLOT_ENDINGS), help="Draw the routers' rows into this PNG (or PDF, SVG).")
@json_option
def simulate(
    *,
    eviction: bool,
    cluster: str | None,
    write: Path | None,
    asked: TraceOptions,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    tick_s: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay requests: what each eviction policy saves (--eviction), or how each router does on a cluster (--cluster,
    with --policy, --load, --tick-s and --plot). With --write they are only written down.

    \b
    Examples:
      headrace simulate --eviction --trace conversation_trace.jsonl
      headrace simulate --cluster h100-8b-pd --load 0.9 --load 1.1 --trace conversation_trace.jsonl --plot routers.png
      headrace simulate --cluster mine.yaml --policy headrace --policy dynamo --trace mine.jsonl --json
      headrace simulate --generate agents --requests 5000 --set prefix_tokens=8000 --write agents.jsonl
      headrace simulate --generate bursts --cluster h100-8b-mixed
    """
    if sum((eviction, bool(cluster), write is not None)) != 1:
        raise click.UsageError("say what to do: --eviction, --cluster with a profile or a file, or --write with a file")
    of_routers = {"--policy": policies, "--load": loads, "--tick-s": tick_s, "--plot": plot}
    stray = [name for name, value in of_routers.items() if value not in ((), None)]
    if stray and not cluster:
        raise click.UsageError(f"{', '.join(stray)}: of --cluster alone")
    trace = asked.load()
    if write is not None:
        write_trace(trace, write)
        _tell_written(trace, write, as_json=as_json)
    elif eviction:
        _compare_eviction(trace, as_json=as_json)
    else:
        tick_s = tick_s if tick_s is not None else TICK_S_OF_FILES * (asked.path is not None)
        draw: Callable[..., Any] | None = None
        if plot is not None:  # what it lacks is said before anything is simulated
            draw = load_function(
                "headrace.simulate.draw_comparison:draw_comparison", command="simulate --plot", extra="report"
            )
        rows = _compare_routing(
            trace,
            str(cluster),
            policies=policies or ("all",),
            loads=loads or LOADS_DEFAULT,
            seed=asked.seed,
            tick_s=tick_s,
            as_json=as_json,
        )
        if draw is not None:
            draw(rows, plot, title=f"{cluster}: {asked.path.name if asked.path else asked.generate}")


def _tell_written(trace: Trace, path: Path, *, as_json: bool) -> None:
    tokens = sum(request.input_tokens for request in trace.requests)
    told = {"path": str(path), "requests": len(trace.requests), "prompt_tokens": tokens, "blocks": trace.num_blocks}
    if as_json:
        print_json(told)
        return
    click.echo(
        f"{path}: {len(trace.requests):,} requests, {tokens:,} prompt tokens, {trace.num_blocks:,} different blocks of "
        f"{trace.block_tokens}"
    )


def _compare_eviction(trace: Trace, *, as_json: bool) -> None:
    rows = replay_eviction(trace, report=say)
    if as_json:
        print_json({"rows": rows})
        return
    shown = [
        [
            f"{row.capacity_share:.0%}",
            row.policy + (" (default)" if row.default else ""),
            f"{row.token_hit_rate:.2%}",
            f"{row.saved_prefill_seconds:,.0f}",
        ]
        for row in rows
    ]
    print_table(["capacity ", "policy ", "tokens hit ", "prefill seconds saved "], shown)


def _compare_routing(
    trace: Trace,
    cluster: str,
    *,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    seed: int,
    tick_s: float,
    as_json: bool,
) -> list[dict[str, Any]]:
    # By name: the simulator of a cluster needs numpy, which the base install has not.
    read_cluster, scale_to_load, replay_routing, known, named = (
        load_function(f"headrace.simulate.{path}", command="simulate", extra="store")
        for path in (
            "cluster_model:read_cluster",
            "replay_routing:scale_to_load",
            "replay_routing:replay_routing",
            "routing_policies:ROUTING_POLICIES",
            "routing_policies:NAMED_POLICIES",
        )
    )
    compared: Any = known
    routers: Any = named
    model = read_cluster(cluster)
    unknown = sorted(set(policies) - set(routers) - {"all"})
    if unknown:
        raise InvalidRequest(f"no router {unknown[0]!r:.40}; there are: {', '.join(routers)}", param="policy")
    chosen = list(compared) if "all" in policies else list(dict.fromkeys(policies))
    rows: list[dict[str, Any]] = []
    for load in loads:
        requests = scale_to_load(trace, model, load=load, tick_s=tick_s, seed=seed)
        for name in chosen:
            say(f"load {load:g}: {name}")
            result = replay_routing(requests, model, routers[name], block_tokens=trace.block_tokens, load=load)
            rows.append(asdict(result))
    if as_json:
        print_json({"rows": rows})
        return rows
    shown = [
        [
            f"{row['load']:g}",
            row["policy"],
            f"{row['hit_share_of_ideal']:.1%}",
            f"{row['ttft_s_p50']:.2f} s",
            f"{row['ttft_s_p90']:.2f} s",
            f"{row['ttft_s_p99']:.2f} s",
            f"{row['slo_share']:.1%}",
            f"{row['goodput_per_s']:,.2f}/s",
            f"{row['itl_ms_p90']:.1f} ms",
            f"{row['imbalance']:.2f}",
            f"{row['fetched_gb']:,.0f} GB",
        ]
        for row in rows
    ]
    heads = "load,router,hits of ideal,TTFT p50,p90,p99,within SLO,goodput,ITL p90,imbalance,moved"
    print_table([f"{head} " for head in heads.split(",")], shown)
    return rows
