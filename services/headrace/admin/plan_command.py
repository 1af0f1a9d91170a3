"""`headrace plan`: how many workers and how much memory a workload needs. Needs no system."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, print_json, print_table, say
from headrace.admin.trace_options import TraceOptions, trace_options
from headrace.core.step_costs import DecodeCost, PrefillCost
from headrace.simulate.generate_trace import Workload, WorkloadShape, generate_trace
from headrace.simulate.model_shape import Machine, ModelShape, estimate_costs, read_model
from headrace.simulate.read_trace import Trace

# Of a sketch: coarse, since a simulation takes as long as it has blocks.
SKETCH_BLOCK_TOKENS = 128
SKETCH = ("prompt_tokens", "output_tokens", "reused", "prefixes")

POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command(short_help="How many workers and how much memory a workload needs.")
@click.option(
    "--model", "model_path", type=click.Path(exists=True, path_type=Path), help="A config.json or the folder with it."
)
@click.option("--layers", type=click.IntRange(min=1), help="Instead of --model, with the four that follow.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Of each layer.")
@click.option("--head-dim", type=click.IntRange(min=1), help="Numbers of one head.")
@click.option("--query-heads", type=click.IntRange(min=1), help="Of each layer.")
@click.option("--parameters-b", type=POSITIVE, help="Billions of parameters.")
@click.option("--kv-bytes", type=click.IntRange(1, 4), default=2, show_default=True, help="Of one number of KV.")
@click.option("--device-memory-gb", type=POSITIVE, default=80.0, show_default=True, help="Of one worker's GPUs.")
@click.option(
    "--host-memory-gib", type=click.FloatRange(min=0), default=100.0, show_default=True, help="For the store."
)
@click.option("--device-gb-per-s", type=POSITIVE, default=3_350.0, show_default=True, help="Memory bandwidth.")
@click.option(
    "--tflops",
    type=POSITIVE,
    default=200.0,
    show_default=True,
    help="That prefill reaches; half the data sheet's or less.",
)
@click.option("--network-gb-per-s", type=POSITIVE, default=25.0, show_default=True, help="Of one host.")
@click.option("--prefill-tokens-per-s", type=POSITIVE, help="Measured, of a short prompt; instead of the estimate.")
@click.option("--decode-step-ms", type=POSITIVE, help="Measured, of a batch of one; instead of the estimate.")
@trace_options
@click.option("--requests-per-s", type=POSITIVE, help="A sketch instead of a trace, with the four that follow.")
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=4_000, show_default=True, help="Mean.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=250, show_default=True, help="Mean.")
@click.option(
    "--reused",
    type=click.FloatRange(0, 0.99),
    default=0.5,
    show_default=True,
    help="Share of a prompt that others have.",
)
@click.option(
    "--prefixes", type=click.IntRange(min=1), default=200, show_default=True, help="Different shared beginnings."
)
@click.option("--ttft-s", type=POSITIVE, default=2.0, show_default=True, help="Target for 90 of 100 requests.")
@click.option("--itl-ms", type=POSITIVE, default=50.0, show_default=True, help="Target for 90 of 100 requests.")
@click.option("--worker-cost", type=POSITIVE, default=1.0, show_default=True, help="Of a worker, in any unit.")
@click.option(
    "--host-gib-cost", type=click.FloatRange(min=0), default=0.0005, show_default=True, help="Of host memory."
)
@json_option
def plan(*, asked: TraceOptions, as_json: bool, **given: Any) -> None:
    """Say how many workers and how much memory a workload needs.

    Room is arithmetic, hits are a replay, seconds are a simulation with the rates that are given or estimated.

    \b
    Examples:
      headrace plan --model /models/llama-3.1-8b --trace conversation_trace.jsonl --requests 4000
      headrace plan --model config.json --requests-per-s 8 --prompt-tokens 6000 --reused 0.7 --ttft-s 1
      headrace plan --layers 32 --kv-heads 8 --head-dim 128 --query-heads 32 --parameters-b 8 --requests-per-s 4 --json
    """
    plan_capacity, targets_class, concurrencies = (
        load_function(f"headrace.simulate.plan_capacity:{name}", command="plan", extra="store")
        for name in ("plan_capacity", "Targets", "CONCURRENCIES")
    )
    model = _model(given)
    machine = Machine(
        device_bytes=given["device_memory_gb"] * 1e9,
        host_bytes=given["host_memory_gib"] * 2**30,
        device_bytes_per_s=given["device_gb_per_s"] * 1e9,
        flops_per_s=given["tflops"] * 1e12,
        network_bytes_per_s=given["network_gb_per_s"] * 1e9,
    )
    targets = targets_class(given["ttft_s"], given["itl_ms"] / 1e3, given["worker_cost"], given["host_gib_cost"])
    found = plan_capacity(
        model, machine, _trace(asked, given), targets, costs=_costs(model, machine, given), report=say
    )
    if as_json:
        print_json(asdict(found))
        return
    _show(found, model, targets, concurrencies=cast(Sequence[int], concurrencies))


def _model(given: dict[str, Any]) -> ModelShape:
    if given["model_path"] is not None:
        return read_model(given["model_path"], kv_bytes=given["kv_bytes"])
    names = ("layers", "kv_heads", "head_dim", "query_heads", "parameters_b")
    missing = [f"--{name.replace('_', '-')}" for name in names if given[name] is None]
    if missing:
        raise click.UsageError(f"name a --model, or give its fields; missing: {', '.join(missing)}")
    layers, kv_heads, head_dim, query_heads, billions = (given[name] for name in names)
    return ModelShape(layers, kv_heads, head_dim, query_heads, billions * 1e9, kv_bytes=given["kv_bytes"])


def _trace(asked: TraceOptions, given: dict[str, Any]) -> Trace:
    if given["requests_per_s"] is None:
        context = click.get_current_context()
        stray = [name for name in SKETCH if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if stray:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in stray)
            raise click.UsageError(f"{names}: of a sketch, which begins with --requests-per-s")
        return asked.load()
    if asked.path is not None or asked.generate is not None:
        raise click.UsageError("--trace, --generate and --requests-per-s are each a workload; give one of them")
    shared = int(given["prompt_tokens"] * given["reused"])
    shape = WorkloadShape(
        requests_per_s=given["requests_per_s"],
        prefixes=given["prefixes"],
        prefix_tokens=shared,
        turn_tokens=given["prompt_tokens"] - shared,
        output_tokens=given["output_tokens"],
    )
    return generate_trace(
        Workload.SHARED_PREFIX,
        requests=asked.requests or 2_000,
        seed=asked.seed,
        shape=shape,
        block_tokens=asked.block_tokens or SKETCH_BLOCK_TOKENS,
    )


def _costs(model: ModelShape, machine: Machine, given: dict[str, Any]) -> tuple[PrefillCost, DecodeCost]:
    prefill, decode = estimate_costs(model, machine)
    if given["prefill_tokens_per_s"]:
        prefill = PrefillCost(prefill.base_s, given["prefill_tokens_per_s"], prefill.attention_s)
    if given["decode_step_ms"]:
        decode = DecodeCost(given["decode_step_ms"] / 1e3, decode.sequence_s, decode.kv_token_s)
    return prefill, decode


def _show(found: Any, model: ModelShape, targets: Any, *, concurrencies: Sequence[int]) -> None:
    kv, gib = found.kv_token_bytes, 2**30
    click.echo(
        f"KV of a token: 2 x {model.layers} layers x {model.kv_heads} kv heads x {model.head_dim} x "
        f"{model.kv_bytes} bytes = {kv:,} bytes"
    )
    click.echo(
        f"one worker: {found.device_tokens:,} tokens in GPU memory ({found.device_blocks:,} blocks of "
        f"{found.block_tokens}), {found.host_tokens:,} in host memory"
    )
    if found.windows is not None:
        row = found.windows
        click.echo(
            f"windows: {row.layers} of {model.layers} layers read the last {row.widest_tokens:,} tokens; of a sequence "
            f"of {row.context_tokens:,} tokens a worker holds {row.held_share:.0%} of all KV at most, a decode step "
            f"reads {row.seen_share:.0%} and a hit moves {row.moved_share:.0%}; the store keeps all"
        )
    prefill, decode = found.prefill, found.decode
    click.echo(
        f"rates: prefill {prefill.tokens_per_s:,.0f} tokens/s and {prefill.attention_s * 1e9:.2f} ns a pair of tokens; "
        f"decode step {decode.base_s * 1e3:.1f} ms + {decode.kv_token_s * 1e9:.0f} ns a token of KV"
    )
    click.echo(
        f"workload: {found.requests_per_s:.2f} requests/s, {found.prompt_tokens_mean:,.0f} prompt tokens and "
        f"{found.output_tokens_mean:,.0f} output tokens each\n"
    )
    print_table(
        ["context ", "sequences that fit ", "within the ITL target ", *(f"ITL of {n} " for n in concurrencies)],
        [
            [
                f"{row.context_tokens:,}", f"{row.fit:,}", f"{row.within_itl:,}",
                *("no room" if ms is None else f"{ms:.1f} ms" for ms in row.itl_ms_at),
            ]
            for row in found.contexts
        ],
    )  # fmt: skip
    click.echo()
    print_table(
        ["store, tokens ", "size ", "prompt tokens found "],
        [[f"{r.store_tokens:,}", f"{r.store_tokens * kv / gib:,.0f} GiB", f"{r.hit_rate:.1%}"] for r in found.reuse],
    )
    click.echo()
    print_table(
        ["prefill ", "decode ", "host memory ", "tokens found ", "TTFT p90 ", "ITL p90 ", "meets ", "cost "],
        [
            [
                str(row.prefill_workers), str(row.decode_workers), f"{row.host_gib:,.0f} GiB", f"{row.hit_rate:.1%}",
                f"{row.ttft_s_p90:.2f} s", f"{row.itl_ms_p90:.1f} ms", "yes" if row.meets else "no", f"{row.cost:.2f}",
            ]
            for row in found.simulated
        ],
    )  # fmt: skip
    click.echo(f"\nprefill : decode = {found.prefill_workers_busy:.2f} : {found.decode_workers_busy:.2f} workers' time")
    click.echo(_verdict(found.chosen, targets) + "\n")
    print_table(
        [f"{head} " for head in "KV,bytes a token,in GPU,in host,of 8K,tokens found,workers,TTFT p90".split(",")],
        [_codec_line(row) for row in found.codecs],
    )


def _codec_line(row: Any) -> list[str]:
    cluster = row.cluster
    return [
        row.name, f"{row.token_bytes:,}", f"{row.device_tokens:,}", f"{row.host_tokens:,}", f"{row.sequences:,}",
        f"{cluster.hit_rate:.1%}" if cluster else "-",
        f"{cluster.prefill_workers} + {cluster.decode_workers}" if cluster else "-",
        f"{cluster.ttft_s_p90:.2f} s" if cluster else "-",
    ]  # fmt: skip


def _verdict(chosen: Any, targets: Any) -> str:
    wanted = f"TTFT {targets.ttft_s:g} s and ITL {targets.itl_s * 1e3:g} ms for 90 of 100 requests"
    if chosen is None:
        return f"nothing that was tried meets {wanted}: faster workers, other targets, or less load"
    return (
        f"cheapest that meets {wanted}: {chosen.prefill_workers} prefill and {chosen.decode_workers} decode workers, "
        f"{chosen.host_gib:,.0f} GiB of host memory in all"
    )
