"""The probes of Ray's pods, asked of a Ray that is started as KubeRay starts it, with its token."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rendered_chart import ray_pods, render

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class RayHead:
    """A head node of its own, and where it listens in place of the chart's ports."""

    ports: dict[int, int]  # port in a pod -> port here

    def status(self, path: str, port: int) -> int:
        """HTTP status that the path answers with, asked without a token; 0 for none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=5) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """`ray start --head` with token authentication; nobody else's Ray is touched."""
    head = RayHead({port: free_port() for port in (6379, 8265, 10001, 52365)})
    # Not pytest's folder: the paths of Ray's sockets must be short.
    folder = Path("/tmp") / f"headrace-probes-{secrets.token_hex(4)}"
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--temp-dir", str(folder), "--num-cpus", "0", "--object-store-memory", str(80 * 2**20)]
    command += ["--dashboard-host", "127.0.0.1"]
    options = {
        6379: "port",
        8265: "dashboard-port",
        10001: "ray-client-server-port",
        52365: "dashboard-agent-listen-port",
    }
    command += [word for port, option in options.items() for word in (f"--{option}", str(head.ports[port]))]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    log = tmp_path_factory.mktemp("ray") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while not (head.status("/api/gcs_healthz", 8265) == head.status("/api/local_raylet_healthz", 52365) == 200):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield head
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def probes() -> list[tuple[str, str, dict[str, Any]]]:
    """Component, kind and what it asks, of each probe that asks Ray itself."""
    pods = ray_pods(render({}))
    containers = {component: pod["spec"]["containers"][0] for component, pod in pods.items()}
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    found = [(component, kind, c[kind]["httpGet"]) for component, c in containers.items() for kind in kinds]
    return [probe for probe in found if probe[2]["port"] != 8000]


@pytest.mark.parametrize(("component", "kind", "asked"), probes(), ids=lambda part: part if type(part) is str else "")
def test_ray_answers_the_probe_without_a_token(ray_head: RayHead, component: str, kind: str, asked: dict[str, Any]):
    """Fails for a path or a port that is not Ray's, or that its token guards: the kubelet has none."""
    assert ray_head.status(asked["path"], asked["port"]) == 200


def test_ray_refuses_what_deploys_without_its_token(ray_head: RayHead):
    """The dashboard's port is the operator's way in: whoever reaches it without the token must not deploy."""
    assert ray_head.status("/api/serve/applications/", 8265) == 401
    assert ray_head.status("/api/jobs/", 8265) == 401
