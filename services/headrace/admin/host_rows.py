"""A system host by host: what runs there, how loaded it is, and who of it does not answer or is gone.

Made of a status and of the holders' books, which one gateway collects. A host is named by the address of its store
node where there is one, else by the name that its parts share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.admin.terminal import human_bytes, human_seconds, to_jsonable, unix_ms_now
from headrace.client import HolderStat, SystemStatus

UNKNOWN_HOST = "(unknown)"


@dataclass(frozen=True, slots=True)
class HostRow:
    """One host. Numbers are of its parts that answer."""

    host: str  # as the parts call it
    address: str  # its store node's, "" without one
    store_nodes: int
    gateways: int
    workers: int
    running: int  # sequences
    waiting: int
    pool_blocks: int
    used_pool_blocks: int
    arena_bytes: int
    used_arena_bytes: int
    disk_bytes: int
    used_disk_bytes: int
    silent: tuple[tuple[str, str], ...]  # (member, why): announced, and does not answer
    gone: tuple[tuple[str, int], ...]  # (member, Unix time in ms when it was there last)

    @property
    def state(self) -> str:
        """`ok`, `silent` where a part does not answer, `gone` where nothing is left of it."""
        if not self.store_nodes + self.gateways + self.workers:
            return "gone"
        return "silent" if self.silent else "ok"


def host_rows(status: SystemStatus, stats: Sequence[HolderStat]) -> list[HostRow]:
    """One row for each host that has a part, or had one lately; by address, those that are gone last."""
    holder_to_host = host_of_holders(status)
    hosts = {*holder_to_host.values(), *(gateway.host for gateway in status.gateways)}
    hosts |= {gone.host or UNKNOWN_HOST for gone in status.gone}
    rows = [_row(host, status, [stat for stat in stats if holder_to_host.get(stat.holder) == host]) for host in hosts]
    return sorted(rows, key=lambda row: (row.state == "gone", row.address or "~", row.host))


def host_of_holders(status: SystemStatus) -> dict[str, str]:
    """On which host each holder is."""
    workers = {f"worker:{worker.worker_id}": worker.host for worker in status.workers}
    return workers | {node.holder: node.host for node in status.store_nodes}


def host_json(row: HostRow) -> dict[str, Any]:
    """A row for programs."""
    gone = [{"member": member, "last_seen_unix_ms": seen} for member, seen in row.gone]
    return {**to_jsonable(row), "state": row.state, "silent": dict(row.silent), "gone": gone}


def host_cells(rows: Sequence[HostRow]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of a table of hosts."""
    columns = ["host ", "address ", "state ", "gateways", "nodes", "workers", "running", "waiting", "pools", "arena"]
    cells = [
        [
            row.host,
            row.address or "-",
            row.state,
            str(row.gateways),
            str(row.store_nodes),
            str(row.workers),
            f"{row.running:,}",
            f"{row.waiting:,}",
            f"{row.used_pool_blocks / row.pool_blocks:.0%}" if row.pool_blocks else "-",
            f"{human_bytes(row.used_arena_bytes)} of {human_bytes(row.arena_bytes)}" if row.arena_bytes else "-",
        ]
        for row in rows
    ]
    return columns, cells


def gone_for(last_seen_unix_ms: int) -> str:
    """How long ago that was, by this machine's clock."""
    return f"{human_seconds(max(0, unix_ms_now() - last_seen_unix_ms) / 1000)} ago"


def _row(host: str, status: SystemStatus, stats: Sequence[HolderStat]) -> HostRow:
    nodes = [node for node in status.store_nodes if node.host == host]
    workers = [worker for worker in status.workers if worker.host == host]
    arenas = [stat for stat in stats if stat.tier == "host" and not stat.error]
    disks = [stat for stat in stats if stat.tier == "disk" and not stat.error]
    silent = {stat.holder: stat.error for stat in stats if stat.error}
    return HostRow(
        host=host,
        address=min((node.address.rpartition(":")[0] for node in nodes), default=""),
        store_nodes=len(nodes),
        gateways=sum(gateway.host == host for gateway in status.gateways),
        workers=len(workers),
        running=sum(worker.running for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        pool_blocks=sum(worker.pool_blocks for worker in workers),
        used_pool_blocks=sum(worker.pool_blocks - worker.free_blocks for worker in workers),
        arena_bytes=sum(stat.total_blocks * stat.block_bytes for stat in arenas),
        used_arena_bytes=sum(stat.committed_blocks * stat.block_bytes for stat in arenas),
        disk_bytes=sum(stat.total_blocks * stat.block_bytes for stat in disks),
        used_disk_bytes=sum(stat.committed_blocks * stat.block_bytes for stat in disks),
        silent=tuple(sorted(silent.items())),
        gone=tuple(
            (gone.member, gone.last_seen_unix_ms) for gone in status.gone if (gone.host or UNKNOWN_HOST) == host
        ),
    )
