"""What the end-to-end tests say of a local system: its settings, its workers, and waiting for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import httpx

from headrace.client.client import HeadraceClient
from headrace.client.values import COLD, Sampling
from headrace.config import Config, load_config
from headrace.core.errors import InvalidRequest, WorkerUnavailable
from headrace_cluster.local_instance import InstanceState

BLOCK_TOKENS = 16
PATIENCE_S = 120.0  # with what comes in seconds on a machine that does nothing else
Result = TypeVar("Result")


@dataclass(frozen=True)
class LocalSystem:
    """A running system and how to reach it."""

    state: InstanceState
    state_dir: Path
    progress: list[str]
    client: HeadraceClient

    def worker_ids(self, role: str) -> list[str]:
        return sorted(w.worker_id for w in self.client.status().workers if w.role == role)

    def worker_pid(self, worker_id: str) -> int:
        return next(w.pid for w in self.client.status().workers if w.worker_id == worker_id)


def make_config(model: Path, state_dir: Path, **settings: object) -> Config:
    return load_config(
        {
            "model": str(model),
            "state_dir": str(state_dir),
            "dtype": "float32",
            "device": "cpu",
            "torch_threads": 1,
            "block_tokens": BLOCK_TOKENS,
            "pool_tokens": 2_048,
            "prefill_chunk_tokens": 64,
            "local_prefill_tokens": 32,
            "load_patience_ms": 10_000,  # the model computes in no time, and these tests are about what is reused
            "arena_mb": 16,
            "http_port": 0,
            "grpc_port": 0,
            **settings,
        },
        environ={},
    )


def when_known(call: Callable[[], Result]) -> Result:
    """What a call comes to that names a worker, as soon as whichever gateway is asked knows that one."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (InvalidRequest, WorkerUnavailable):
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.2)


def wait_until_known(system: LocalSystem, *, workers: int) -> None:
    """Until every gateway knows so many decode workers, and serves by each: Serve chooses the gateway that is asked, so
    each worker is asked for often enough that hardly one is passed over."""
    wait_until(lambda: len(system.worker_ids("decode")) == workers, what=f"{workers} decode workers")
    one = Sampling(max_tokens=1)
    for worker in system.worker_ids("decode"):
        alone = replace(COLD, decode_worker=worker)
        for _ in range(12):
            when_known(lambda alone=alone: system.client.generate("Hello", sampling=one, cache=alone, timeout_s=60))


def wait_until(holds: Callable[[], bool], *, what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.1)


def metrics_page(port: int) -> str:
    """What a part says on its metrics port, asked directly: without proxy, gateway or announcement."""
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
