"""`headrace simulate ...`: replay a trace through the policies that stores and gateways run. Needs no system."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, print_json, print_table
from headrace.core.errors import InvalidRequest
from headrace.simulate.read_trace import USERS_DEFAULT, Trace, read_trace
from headrace.simulate.replay_eviction import replay_eviction


@click.command(short_help="Replay a trace through policies or routers.")
@click.option("--eviction", is_flag=True, help="Compare the eviction policies and the bound.")
@click.option("--cluster", help="Compare routers on this cluster: a profile's name or a YAML file.")
@click.option(
    "--trace",
    "trace_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with input_length and hash_ids, or conversations with hash_runs; may be gzipped.",
)
@click.option(
    "--policy", "policies", multiple=True, default=("all",), show_default=True, help="Routers: names, or all."
)
@click.option(
    "--load", "loads", multiple=True, type=click.FloatRange(min=0.01, max=10), default=(0.9,), show_default=True,
    help="Cold prefill work over what the workers can do; repeat for several.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the arrivals' jitter.")
@click.option(
    "--tick-s", type=click.FloatRange(min=0), default=3.0, show_default=True, help="Jitter: the trace's tick."
)
@click.option("--block-tokens", type=click.IntRange(min=1), help="Tokens of a block. Default: what fits the lengths.")
@click.option("--merge-blocks", type=click.IntRange(min=1), default=1, help="Replay so many blocks as one.")
@click.option(
    "--users", type=click.IntRange(min=1), default=USERS_DEFAULT, help="Conversations replayed at the same time."
)
@json_option
def simulate(
    *,
    eviction: bool,
    cluster: str | None,
    trace_path: Path,
    policies: tuple[str, ...],
    loads: tuple[float, ...],
    seed: int,
    tick_s: float,
    block_tokens: int | None,
    merge_blocks: int,
    users: int,
    as_json: bool,
) -> None:
    """Replay a trace: what each eviction policy saves, or how each router does on a cluster.

    \b
    Examples:
      headrace simulate --eviction --trace conversation_trace.jsonl
      headrace simulate --cluster h100-8b-pd --load 0.9 --load 1.1 --trace conversation_trace.jsonl
      headrace simulate --cluster mine.yaml --policy headrace --policy dynamo --trace mine.jsonl --json
    """
    if eviction == bool(cluster):
        raise InvalidRequest("say what to compare: --eviction, or --cluster with a profile or a file", param="cluster")
    trace = read_trace(trace_path, report=_report, block_tokens=block_tokens, merge_blocks=merge_blocks, users=users)
    if eviction:
        _compare_eviction(trace, as_json=as_json)
    else:
        assert cluster
        _compare_routing(trace, cluster, policies=policies, loads=loads, seed=seed, tick_s=tick_s, as_json=as_json)


def _compare_eviction(trace: Trace, *, as_json: bool) -> None:
    rows = replay_eviction(trace, report=_report)
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
) -> None:
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
            _report(f"load {load:g}: {name}")
            result = replay_routing(requests, model, routers[name], block_tokens=trace.block_tokens, load=load)
            rows.append(asdict(result))
    if as_json:
        print_json({"rows": rows})
        return
    shown = [
        [
            f"{row['load']:g}",
            row["policy"],
            f"{row['hit_share_of_ideal']:.1%}",
            f"{row['ttft_s_p50']:.2f} s",
            f"{row['ttft_s_p90']:.2f} s",
            f"{row['ttft_s_p99']:.2f} s",
            f"{row['slo_share']:.1%}",
            f"{row['itl_ms_p90']:.1f} ms",
            f"{row['imbalance']:.2f}",
            f"{row['fetched_gb']:,.0f} GB",
        ]
        for row in rows
    ]
    heads = "load,router,hits of ideal,TTFT p50,p90,p99,within SLO,ITL p90,imbalance,moved"
    print_table([f"{head} " for head in heads.split(",")], shown)


def _report(line: str) -> None:
    click.echo(line, err=True)
