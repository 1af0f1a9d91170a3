"""Headrace on three hosts: Ray's head alone, and two hosts with a gateway and a decode worker each, one of which has
the prefill worker, too. What the tests ask of it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, Network, wait_until
from ray_hosts import START_WITHIN_S, RayHosts

from headrace.client.admin_values import WorkerStatus
from headrace.client.client import HeadraceClient
from headrace.client.values import COLD, CacheOptions, GenerateResult, Sampling

BLOCK_TOKENS = 16
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "torch_threads": 1,
    "block_tokens": BLOCK_TOKENS,
    "pool_tokens": 2_048,
    "prefill_chunk_tokens": 64,
    "local_prefill_tokens": 32,
    "load_patience_ms": 60_000,  # the model computes in no time, and these tests are about what is reused
    "arena_mb": 16,
    "prefill_workers": 1,
    "decode_workers": 2,
    "gateways": 2,
}
# Which host takes what, by Ray's own means: custom resources of the nodes.
ON_DECODE = {"num_cpus": 0.1, "resources": {"decode": 1}}
DEPLOYMENTS = [
    {"name": "Gateway", "ray_actor_options": {"num_cpus": 0.1, "resources": {"gateway": 1}}},
    {"name": "PrefillWorker", "ray_actor_options": {"num_cpus": 0.1, "resources": {"prefill": 1}}},
    {"name": "DecodeWorker", "ray_actor_options": ON_DECODE},
]
TOKENS = Sampling(max_tokens=12, ignore_eos=True)


@dataclass
class Fleet:
    """The running system. `a` has a prefill and a decode worker, `b` a decode worker; both have a gateway."""

    ray: RayHosts
    client: HeadraceClient  # to the proxy of host `a`

    @property
    def a(self) -> Host:
        return self.ray.hosts["a"]

    @property
    def b(self) -> Host:
        return self.ray.hosts["b"]

    def workers(self, host: Host, role: str = "decode") -> list[WorkerStatus]:
        """Live workers of a role on a host, by the store node that they announce: it is named after its host."""
        status = self.client.status()
        (node,) = [node for node in status.store_nodes if node.node_id == host.name]
        return [worker for worker in status.workers if worker.host == node.host and worker.role == role]

    def ask(
        self, prompt: list[int], *, on: Host, prefill_on: Host | None = None, sampling: Sampling = TOKENS
    ) -> GenerateResult:
        """An answer by the decode worker of this host."""
        (decode,) = self.workers(on)
        prefill = "" if prefill_on is None else self.workers(prefill_on, "prefill")[0].worker_id
        cache = CacheOptions(decode_worker=decode.worker_id, prefill_worker=prefill)
        return self.client.generate(prompt, sampling=sampling, cache=cache, timeout_s=120)

    def cold(self, prompt: list[int], *, sampling: Sampling = TOKENS) -> tuple[int, ...]:
        """The tokens that an uncached computation gives."""
        return self.client.generate(prompt, sampling=sampling, cache=COLD, timeout_s=120).token_ids

    def is_whole(self) -> bool:
        """Whether all that the settings name is there and known, as any gateway sees it."""
        status = self.client.status()
        return (len(status.workers), len(status.gateways)) == (3, 2)


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
    ray.deploy(settings=SETTINGS | {"model": str(model)}, deployments=DEPLOYMENTS)
    ray.wait_until_running()
    client = ray.client(ray.hosts["a"])
    try:
        fleet = Fleet(ray=ray, client=client)
        wait_until(fleet.is_whole, within_s=START_WITHIN_S, what="all members")
        yield fleet
    finally:
        client.close()
