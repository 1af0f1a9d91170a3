"""`headrace bench simulator`: how far the simulator is off from a live system on this machine."""

import os
from pathlib import Path
from typing import Any

import click

from headrace.admin.bench_commands import bounded, load_options, local_system, made_up_options, show_report
from headrace.admin.output_file import OutputFile
from headrace.admin.setting_flags import setting_options
from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, say
from headrace.config import load_config


@click.command(short_help="How far the simulator is off, on this machine.")
@click.option("--runs", type=click.IntRange(1, 20), default=3, show_default=True, help="Loads, each with new prompts.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Requests a second."
)
@made_up_options
@click.option("--prefill-workers", type=click.IntRange(min=0), default=0, show_default=True, help="That only prefill.")
@click.option(
    "--decode-workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="That decode; without the former they do both.",
)
@load_options
@click.option(
    "--write",
    type=OutputFile(),
    help="Write the fitted cluster, for `headrace simulate --cluster`.",
)
@setting_options("model", "engine", "store")
@json_option
def simulator(
    *,
    runs: int,
    rate: float,
    generate: str,
    settings: tuple[str, ...],
    prefill_workers: int,
    decode_workers: int,
    seed: int,
    max_tokens: int,
    bounds: Any,
    slo: Any,
    write: Path | None,
    flags: dict[str, Any],
    config_file: str | None,
    as_json: bool,
) -> None:
    """Start a system on this machine, load it, simulate the same load, and show both and the error.

    The simulated cluster has the constants that the workers measured of themselves while the load ran. `--write` keeps
    it: a profile of this machine, for `headrace simulate --cluster`. Stops nothing that it did not start.

    \b
    Examples:
      headrace bench simulator --requests 100 --rate 1
      headrace bench simulator --prefill-workers 1 --requests 60 --runs 1 --write this-machine.yaml
    """
    measure_simulator, live_system, workload, write_cluster = (
        load_function(f"headrace.{path}", command="bench simulator", extra="all")
        for path in (
            "bench.measure_simulator:measure_simulator",
            "bench.measure_simulator:LiveSystem",
            "bench.measure_serving:Workload",
            "simulate.cluster_model:write_cluster",
        )
    )
    config = load_config(flags, config_file=config_file)
    workers = {"prefill_workers": prefill_workers, "decode_workers": decode_workers}
    with local_system({**flags, **workers}, config_file) as system:
        found = measure_simulator(
            live_system(
                grpc_address=system.grpc_address,
                redis_url=system.redis_url,
                host_bytes=config.store.arena_mb * 2**20,
                prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
                local_prefill_tokens=config.gateway.local_prefill_tokens,
            ),
            workload(kind=generate, shape=settings, rate=rate, seed=seed, output_tokens_max=max_tokens),
            runs=runs,
            bounds=bounded(bounds),
            slo=slo,
            report=say,
        )
    show_report(found, as_json=as_json)
    for remark in found.remarks():
        say(remark)
    if write is not None:
        made = f"Fitted by `headrace bench simulator` to {found.model} on a machine with {os.cpu_count()} cores."
        write_cluster(found.cluster, write, remarks=(made,))
        say(f"cluster: {write}")
