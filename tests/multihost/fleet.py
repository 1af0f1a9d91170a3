"""Headrace on three hosts: Ray's head alone, and two hosts with a gateway and a decode worker each, one of which has
the prefill worker, too. What the tests ask of it."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Host, Network, wait_until
from ray_hosts import START_WITHIN_S, RayHosts
from tiny_model import make_tiny_model

from headrace.client.admin_values import SystemStatus, WorkerStatus
from headrace.client.client import HeadraceClient
from headrace.client.values import COLD, CacheOptions, GenerateResult, Sampling
from headrace.core.block import CacheSource
from headrace.core.errors import HeadraceError
from headrace.core.generation import ALL_SOURCES

BLOCK_TOKENS = 16
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "torch_threads": 1,
    "block_tokens": BLOCK_TOKENS,
    "pool_tokens": 2_048,
    "prefill_chunk_tokens": 64,
    "local_prefill_tokens": 4_096,  # prefill workers work for those requests that name one
    "load_patience_ms": 5_000,  # the model computes in no time, and these tests are about what is reused
    "arena_mb": 64,
    "prefill_workers": 1,
    "decode_workers": 2,
    "gateways": 2,
}
# Which host takes what, by Ray's own means: custom resources of the nodes.
DEPLOYMENTS = [
    {
        "name": name,
        "ray_actor_options": {"num_cpus": 0.1, "resources": {resource: 1}},
        # Whatever streams when a replica is to go may end by itself.
        "graceful_shutdown_timeout_s": 120,
    }
    for name, resource in (("Gateway", "gateway"), ("PrefillWorker", "prefill"), ("DecodeWorker", "decode"))
]
TOKENS = Sampling(max_tokens=12, ignore_eos=True)


@dataclass
class Fleet:
    """The running system. `a` has a prefill and a decode worker, `b` a decode worker; both have a gateway."""

    ray: RayHosts
    settings: dict[str, Any]
    clients: dict[str, HeadraceClient]  # by host, each to its host's proxy, which prefers its host's gateway

    @property
    def a(self) -> Host:
        return self.ray.hosts["a"]

    @property
    def b(self) -> Host:
        return self.ray.hosts["b"]

    @property
    def client(self) -> HeadraceClient:
        return self.clients["a"]

    def deploy(self, **settings: Any) -> None:
        """`serve deploy` with these settings changed."""
        self.ray.deploy(settings=self.settings | settings, deployments=DEPLOYMENTS)

    def workers(self, host: Host, role: str = "decode") -> list[WorkerStatus]:
        """Live workers of a role on a host, by the store node that they announce: it is named after its host."""
        status = self.client.status()
        near = {node.host for node in status.store_nodes if node.node_id == host.name}
        return [worker for worker in status.workers if worker.host in near and worker.role == role]

    def worker(self, host: Host, role: str = "decode") -> WorkerStatus:
        """The one of that role there; waits for it."""
        found: list[WorkerStatus] = []

        def is_there() -> bool:
            found[:] = self.workers(host, role)
            return len(found) == 1

        wait_until(is_there, within_s=120, what=f"one {role} worker on {host.name}")
        return found[0]

    def ask(
        self,
        prompt: list[int],
        *,
        on: Host,
        prefill_on: Host | None = None,
        sources: frozenset[CacheSource] = ALL_SOURCES,
        through: Host | None = None,
    ) -> GenerateResult:
        """An answer by the decode worker of a host, through the proxy of the same one unless another is named."""
        prefill = "" if prefill_on is None else self.worker(prefill_on, "prefill").worker_id
        cache = CacheOptions(sources=sources, decode_worker=self.worker(on).worker_id, prefill_worker=prefill)
        client = self.clients[(through or on).name]
        return client.generate(prompt, sampling=TOKENS, cache=cache, timeout_s=120)

    def cold(self, prompt: list[int]) -> tuple[int, ...]:
        """The tokens that an uncached computation gives."""
        return self.client.generate(prompt, sampling=TOKENS, cache=COLD, timeout_s=120).token_ids

    def is_whole(self) -> bool:
        """Whether all that the settings name is there and known."""
        return self.shows(lambda status: (len(status.workers), len(status.gateways)) == (3, 2))

    def shows(self, holds: Callable[[SystemStatus], object]) -> bool:
        """Whether the status is such; not while it cannot be had."""
        try:
            return bool(holds(self.client.status()))
        except HeadraceError:
            return False


def make_model(directory: Path) -> Path:
    """A model of 6 million parameters. A prompt takes it many times longer to compute than to fetch, so that the
    gateways, who go by what they have measured, choose to fetch."""
    return make_tiny_model(directory, hidden_size=256, num_layers=8)


def make_prompt(tokens: int, *, seed: int) -> list[int]:
    """Token ids that no other seed has in its first block."""
    return random.Random(seed).choices(range(10, 290), k=tokens)


@contextmanager
def start_fleet(network: Network, directory: Path, model: Path) -> Iterator[Fleet]:
    """Start all of it, wait until it serves. The network's closing ends it."""
    ray = RayHosts(network, directory)
    ray.start_redis()
    ray.add_host("head", cpus=0)
    ray.add_host("a", resources={"gateway": 1, "prefill": 1, "decode": 1})
    ray.add_host("b", resources={"gateway": 1, "decode": 1})
    wait_until(ray.dashboard, within_s=START_WITHIN_S, what="Ray's dashboard")
    fleet = Fleet(ray, SETTINGS | {"model": str(model)}, {name: ray.client(ray.hosts[name]) for name in ("a", "b")})
    try:
        fleet.deploy()
        ray.wait_until_running()
        wait_until(fleet.is_whole, within_s=START_WITHIN_S, what="all members")
        yield fleet
    finally:
        for client in fleet.clients.values():
            client.close()
