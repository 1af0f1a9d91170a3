"""`headrace status`: who is there, host by host, how loaded, who does not answer, and who is gone since when."""

from typing import Any

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.host_rows import HostRow, gone_for, host_cells, host_json, host_rows
from headrace.admin.terminal import (
    exit_if_incomplete,
    json_option,
    print_json,
    print_table,
    to_jsonable,
)
from headrace.client import HolderStat, SystemStatus


@click.command(short_help="Show all parts by host, and who is missing.")
@address_option
@json_option
def status(*, address: str, as_json: bool) -> None:
    """Show live store nodes, gateways, and workers with their load, host by host, and whether the index answers.

    A part that is announced and does not answer is silent, with the reason; one that was there within the last
    15 minutes and is announced no more is gone, since so long. Exit code 9 when a part is silent.

    `headrace nodes ls` says more of the nodes, `headrace doctor` whether all of this agrees; `headrace top` goes on
    looking.

    \b
    Examples:
      headrace status
      headrace status --json | jq -r '.workers[] | select(.waiting > 0) | .worker_id'
      headrace status --json | jq -r '.hosts[] | select(.state != "ok") | [.host, .state] | @tsv'
    """
    with connect(address) as client:
        found = client.status()
        # Without the index nobody knows whom to ask for books, and who was there last is all that there is to tell.
        stats = client.stat() if found.index_available else ()
    rows = host_rows(found, stats)
    errors = tuple(error for row in rows for error in row.silent)
    if as_json:
        print_json(_as_json(found, rows, errors))
    else:
        _print_status(found, rows, stats)
    exit_if_incomplete(errors)


def _as_json(found: SystemStatus, rows: list[HostRow], errors: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {**to_jsonable(found), "hosts": [host_json(row) for row in rows], "errors": dict(errors)}


def _print_status(found: SystemStatus, rows: list[HostRow], stats: tuple[HolderStat, ...]) -> None:
    silent = {stat.holder for stat in stats if stat.error}
    print_table(*host_cells(rows))
    click.echo()
    workers = [
        [
            worker.worker_id,
            "silent" if f"worker:{worker.worker_id}" in silent else "ok",
            worker.role,
            worker.model,
            worker.host,
            worker.store_node or "-",
            f"{worker.running:,}",
            f"{worker.waiting:,}",
            f"{worker.pool_blocks - worker.free_blocks:,}/{worker.pool_blocks:,}",
            str(worker.metrics_port),
            str(worker.pid),
        ]
        for worker in found.workers
    ]
    columns = ["worker ", "state ", "role ", "model ", "host ", "store node ", "running", "waiting", "blocks in use"]
    print_table([*columns, "metrics port", "pid"], workers)
    click.echo()
    nodes = [
        [
            node.node_id,
            "silent" if node.holder in silent else "draining" if node.draining else "ok",
            node.host,
            node.address,
            str(node.incarnation),
            str(node.metrics_port),
            str(node.pid),
        ]
        for node in found.store_nodes
    ]
    print_table(["store node ", "state ", "host ", "address ", "incarnation", "metrics port", "pid"], nodes)
    click.echo()
    gateways = [[g.gateway_id, g.host, str(g.metrics_port), str(g.pid)] for g in found.gateways]
    print_table(["gateway ", "host ", "metrics port", "pid"], gateways)
    if found.gone:
        click.echo()
        gone = [[g.member, g.host or "-", gone_for(g.last_seen_unix_ms)] for g in found.gone]
        print_table(["gone ", "host ", "last seen"], gone)
    click.echo(f"\nindex: {'available' if found.index_available else 'NOT available; requests go on without reuse'}")
