"""What `headrace bench fetch` found, for scripts and for people."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FetchRow:
    """One block size. Rates are medians over the passes, in GB/s of 10^9 bytes; latencies are of one block."""

    block_bytes: int
    memcpy_gbps: float
    tcp_gbps: float
    redis_get_gbps: float
    grpc_gbps: float
    shm_gbps: float
    loaded_grpc_gbps: float  # into a worker's pool, headers and checksums verified
    loaded_shm_gbps: float
    grpc_us_p50: float
    grpc_us_p99: float
    shm_us_p50: float
    shm_us_p99: float
    cpu_s_per_gb: float  # over gRPC, this process and the store node's together
    shm_cpu_s_per_gb: float

    @property
    def shm_of_memcpy(self) -> float:
        """Shared memory's share of memcpy."""
        return self.shm_gbps / self.memcpy_gbps

    @property
    def grpc_of_tcp(self) -> float:
        """gRPC's share of a raw loopback connection."""
        return self.grpc_gbps / self.tcp_gbps

    @property
    def grpc_of_redis(self) -> float:
        """gRPC as a multiple of Redis GET."""
        return self.grpc_gbps / self.redis_get_gbps


@dataclass(frozen=True, slots=True)
class FetchReport:
    """All rows of one run."""

    rows: tuple[FetchRow, ...]
    passes: int  # each column of each row was measured so often, in turn
    run_bytes: int  # bytes of one pass
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The report for scripts."""
        rows = [{name: round(value, 3) for name, value in asdict(row).items()} for row in self.rows]
        return {"rows": rows, "passes": self.passes, "run_bytes": self.run_bytes, "seconds": round(self.seconds, 1)}

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table."""
        rates = [
            [
                _size(row.block_bytes),
                *_two_digits(row.memcpy_gbps, row.shm_gbps, row.loaded_shm_gbps),
                *_two_digits(row.tcp_gbps, row.grpc_gbps, row.loaded_grpc_gbps, row.redis_get_gbps),
                f"{row.shm_of_memcpy:.0%}",
                f"{row.grpc_of_tcp:.0%}",
                f"{row.grpc_of_redis:.1f}x",
            ]
            for row in self.rows
        ]
        costs = [
            [
                _size(row.block_bytes),
                *(f"{us:,.0f}" for us in (row.shm_us_p50, row.shm_us_p99, row.grpc_us_p50, row.grpc_us_p99)),
                *_two_digits(row.shm_cpu_s_per_gb, row.cpu_s_per_gb),
            ]
            for row in self.rows
        ]
        rate_columns = "block,memcpy,shm,shm loaded,tcp,grpc,grpc loaded,redis get,shm/memcpy,grpc/tcp,grpc/redis"
        cost_columns = "block,shm p50 us,p99 us,grpc p50 us,p99 us,shm cpu s/GB,grpc cpu s/GB"
        return [
            ("GB/s (10^9 bytes), median; loaded: verified, into a worker's pool", rate_columns.split(","), rates),
            (
                "one block: lease, fetch, copy, release; processor time of reader and node",
                cost_columns.split(","),
                costs,
            ),
        ]


def _size(block_bytes: int) -> str:
    return f"{block_bytes // 1024:,} KiB"


def _two_digits(*values: float) -> Sequence[str]:
    return [f"{value:.2f}" for value in values]
