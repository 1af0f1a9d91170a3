"""The measurement itself, small: what it promises to report is there, checked, and nothing stays behind."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.bench.data_paths import check_blocks, copy_in_memory
from headrace.bench.measure_fetch import make_runs, measure_fetch
from headrace.core.errors import BlockCorrupt

SMALL_RUN_BYTES = 4 * 1024 * 1024
RATES = ("memcpy_gbps", "tcp_gbps", "redis_get_gbps", "grpc_gbps", "shm_gbps")
LATENCIES = ("grpc_us_p50", "grpc_us_p99", "shm_us_p50", "shm_us_p99")


def arenas() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("headrace-bench-*")}


def test_bench_fetch_measures_every_column_for_every_block_size():
    """Fails when a column is missing, a copy differs from what was stored, or the arena's file stays."""
    before, said = arenas(), []

    report = measure_fetch(report=said.append, run_bytes=SMALL_RUN_BYTES, rounds_max=3)

    found = json.loads(json.dumps(report.as_json()))
    assert [row["block_bytes"] for row in found["rows"]] == [65_536, 368_640, 1_048_576, 4_194_304]
    for row in found["rows"]:
        assert all(row[name] > 0 for name in (*RATES, *LATENCIES, "cpu_s_per_gb"))
        assert row["grpc_us_p50"] <= row["grpc_us_p99"]
        assert row["shm_us_p50"] <= row["shm_us_p99"]
    assert found["passes"] == 3
    assert len(said) >= 3
    assert all(len(cells) == len(columns) for _, columns, rows in report.tables() for cells in rows)
    assert arenas() == before


async def test_a_copy_that_differs_in_one_byte_is_no_measurement():
    """Fails when copies are not compared: a path that moves nothing would be the fastest."""
    run = make_runs(SMALL_RUN_BYTES)[1]
    destination = memoryview(bytearray(len(run.payloads)))
    await copy_in_memory(run, destination)
    check_blocks(run, destination, range(run.num_blocks))

    destination[3 * run.block_bytes + 5] ^= 1

    check_blocks(run, destination, range(3))
    with pytest.raises(BlockCorrupt):
        check_blocks(run, destination, range(run.num_blocks))


def test_bench_fetch_says_what_it_measures():
    shown = CliRunner().invoke(main, ["bench", "fetch", "--help"])
    assert shown.exit_code == 0
    assert "10^9 bytes" in shown.output
