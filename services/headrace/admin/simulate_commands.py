"""`headrace simulate ...`: replay a trace through the policies that the store runs. Needs no running system."""

from pathlib import Path

import click

from headrace.admin.terminal import json_option, print_json, print_table
from headrace.simulate.read_trace import USERS_DEFAULT, read_trace
from headrace.simulate.replay_eviction import replay_eviction


@click.command()
@click.option("--eviction", is_flag=True, required=True, help="Compare the eviction policies and the bound.")
@click.option(
    "--trace",
    "trace_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with input_length and hash_ids, or conversations with hash_runs; may be gzipped.",
)
@click.option("--block-tokens", type=click.IntRange(min=1), help="Tokens of a block. Default: what fits the lengths.")
@click.option("--merge-blocks", type=click.IntRange(min=1), default=1, help="Replay so many blocks as one.")
@click.option(
    "--users", type=click.IntRange(min=1), default=USERS_DEFAULT, help="Conversations replayed at the same time."
)
@json_option
def simulate(
    *, eviction: bool, trace_path: Path, block_tokens: int | None, merge_blocks: int, users: int, as_json: bool
) -> None:
    """Replay a trace and show what each policy would have saved, at 1 to 20 % of its blocks.

    \b
    Example:
      headrace simulate --eviction --trace conversation_trace.jsonl
    """
    assert eviction, "click requires the flag"

    def report(line: str) -> None:
        click.echo(line, err=True)

    trace = read_trace(trace_path, report=report, block_tokens=block_tokens, merge_blocks=merge_blocks, users=users)
    rows = replay_eviction(trace, report=report)
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
