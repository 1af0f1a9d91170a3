"""`headrace bench`: what the data plane does on this machine, beside what the machine can do."""

import click

from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, print_json, print_table, say


@click.group()
def bench() -> None:
    """Measure parts of the system on this machine. Needs no running system."""


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
    found = measure_fetch(report=say)
    if as_json:
        print_json(found.as_json())
        return
    for title, columns, rows in found.tables():
        print_table(columns, rows, title=title)
        click.echo()
