"""A system host by host, from a status and the holders' books."""

from headrace.admin.host_rows import UNKNOWN_HOST, host_rows
from headrace.client import GatewayStatus, GoneMember, HolderStat, StoreNodeStatus, SystemStatus, WorkerStatus


def make_worker(name: str, host: str, **load: int) -> WorkerStatus:
    counts = {"running": 0, "waiting": 0, "free_blocks": 10, "pool_blocks": 10} | load
    return WorkerStatus(
        worker_id=name,
        role="both",
        host=host,
        store_node="",
        model="m",
        namespace="",
        pid=1,
        context_tokens_max=9,
        metrics_port=0,
        **counts,
    )


def make_node(name: str, host: str, address: str) -> StoreNodeStatus:
    return StoreNodeStatus(node_id=name, incarnation=1, host=host, address=address, pid=1, metrics_port=0)


def make_stat(holder: str, tier: str = "host", error: str = "", *, total: int = 10, committed: int = 4) -> HolderStat:
    zeros = dict.fromkeys(
        "incarnation reserved_blocks leased_blocks lookups_tokens hits_tokens evicted_blocks".split(), 0
    )
    return HolderStat(
        holder=holder,
        tier=tier,
        error=error,
        total_blocks=total,
        committed_blocks=committed,
        free_blocks=total - committed,
        block_bytes=100,
        **zeros,
    )


def test_every_host_has_a_row_with_the_sums_of_its_own_parts():
    """Fails when parts of two hosts are added up, or a tier counts as another."""
    status = SystemStatus(
        store_nodes=(make_node("a", "h1", "10.0.0.1:7000"), make_node("b", "h2", "10.0.0.2:7000")),
        workers=(
            make_worker("w1", "h1", running=2, waiting=1, free_blocks=4),
            make_worker("w2", "h1", running=1),
            make_worker("w3", "h2", waiting=5),
        ),
        index_available=True,
        gateways=(GatewayStatus("g", "h2", "10.0.0.2:1", 1, 0, "1"),),
    )
    stats = [make_stat("node:a"), make_stat("node:a", "disk", total=50, committed=20), make_stat("node:b", committed=9)]
    first, second = host_rows(status, stats)
    assert (first.address, first.store_nodes, first.gateways, first.workers) == ("10.0.0.1", 1, 0, 2)
    assert (first.running, first.waiting, first.used_pool_blocks, first.pool_blocks) == (3, 1, 6, 20)
    assert (first.used_arena_bytes, first.arena_bytes) == (400, 1_000)
    assert (first.used_disk_bytes, first.disk_bytes) == (2_000, 5_000)
    assert (second.address, second.gateways, second.waiting, second.used_arena_bytes) == ("10.0.0.2", 1, 5, 900)
    assert {first.state, second.state} == {"ok"}


def test_a_part_that_does_not_answer_makes_its_host_silent_with_the_reason_and_no_numbers():
    """Fails when the books of who did not answer count as empty ones, or its host looks well."""
    status = SystemStatus((make_node("a", "h1", "10.0.0.1:7000"),), (), index_available=True)
    (row,) = host_rows(status, [make_stat("node:a", error="connection refused", total=0, committed=0)])
    assert (row.state, row.silent, row.arena_bytes) == ("silent", (("node:a", "connection refused"),), 0)


def test_a_host_of_which_nothing_is_left_is_gone_and_comes_last():
    """Fails when a host vanishes from the table in the moment in which somebody looks for it."""
    status = SystemStatus(
        (make_node("b", "h2", "10.0.0.2:7000"),),
        (),
        index_available=True,
        gone=(GoneMember("node:a", "h1", 5), GoneMember("worker:w2", "h2", 6), GoneMember("worker:w9", "", 7)),
    )
    rows = {row.host: row for row in host_rows(status, [make_stat("node:b")])}
    assert list(rows) == ["h2", UNKNOWN_HOST, "h1"]
    assert {host: row.state for host, row in rows.items()} == {"h2": "ok", "h1": "gone", UNKNOWN_HOST: "gone"}
    assert rows["h1"].gone == (("node:a", 5),)
    assert rows["h2"].gone == (("worker:w2", 6),)
