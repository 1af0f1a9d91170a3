"""Kind 17, packaging: the chart's probes, asked of what runs in its pods.

Two Ray nodes are started as KubeRay starts the pods of a release (the environment, the resources and the Serve config
are those of the render; addresses, ports, the model and sizes are this test's): a gateway's pod first, a worker's pod
later. So each state is there for as long as it is looked at: nothing deployed, no worker yet, a worker that serves,
Redis gone, Ray stalled.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from free_ports import free_ports
from redis import Redis
from rendered_chart import ray_pods, render, serve_config

from headrace.core.members import WorkerRecord
from headrace.core.telemetry_limits import METRICS_PORTS
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.member_records import decode_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_500)]

BIN = Path(sys.executable).parent
OTHER_PORTS = 3 + 2 * 3  # of the release, and of either pod
CLUSTER = "headrace-x7c2p"
# How long a state may take to come about on a machine that is busy with other tests.
PATIENCE_S = 480.0
# One gateway and one worker, in pods of their own.
VALUES = {"settings": {"gateways": 1, "prefill_workers": 0, "decode_workers": 1, "arena_mb": 32, "device": "cpu"}}


def status(path: str, port: int) -> int:
    """What a port of this machine answers; 0 for nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class Pod:
    """A Ray node in place of a pod: its process, the container that it stands for, and port there -> port here."""

    process: "subprocess.Popen[bytes]"
    container: dict[str, Any]
    ports: dict[int, int]

    def probe(self, kind: str) -> int:
        """HTTP status that the kubelet would get, who has no token; 0 for none."""
        asked = self.container[kind]["httpGet"]
        return self.status(asked["path"], asked["port"])

    def status(self, path: str, port: int) -> int:
        return status(path, self.ports[port])

    def memory_bytes(self) -> int:
        """What its processes take together; what they share is counted once."""
        ours = psutil.Process(self.process.pid)
        total = 0
        for process in [ours, *ours.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total


class Release:
    """The pods of a release, and what is beside them."""

    def __init__(self, folder: Path, logs: Path, model: Path) -> None:
        self._folder, self._logs, self._model = folder, logs, model
        self._manifests = render(VALUES)
        self._valkey = EmbeddedValkey()
        self._redis_url = self._valkey.start()
        # One of Ray, one of Serve's proxies: the nodes share a machine, so each has its own ports.
        # The parts of both pods count up from one port here: nothing, the gateway, the worker's store node and it.
        ports = free_ports(METRICS_PORTS + OTHER_PORTS)
        self.metrics, self._ports = ports[0], iter(ports[METRICS_PORTS:])
        self.gcs, self.http, self.grpc = next(self._ports), next(self._ports), next(self._ports)
        self._token = secrets.token_hex(32)
        self._started: list[Pod] = []

    def start_pod(self, component: str, *, head: bool) -> Pod:
        """A Ray node with the pod's environment and resources."""
        container = ray_pods(self._manifests)[component]["spec"]["containers"][0]
        ports = {port: next(self._ports) for port in (8265, 10001, 52365)} | {8000: self.http, 9000: self.grpc}
        ports[9401] = self.metrics + (1 if component == "gateway" else 2)
        words = ["--disable-usage-stats", "--block", "--node-ip-address", "127.0.0.1", "--num-cpus", "1"]
        words += ["--object-store-memory", str(80 * 2**20), "--dashboard-agent-listen-port", str(ports[52365])]
        words += ["--resources", json.dumps({f"headrace_{component.replace('both', 'decode')}": 1})]
        if head:
            words += ["--head", "--port", str(self.gcs), "--temp-dir", str(self._folder)]
            words += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports[8265])]
            words += ["--ray-client-server-port", str(ports[10001])]
        else:
            words += ["--address", f"127.0.0.1:{self.gcs}"]
        with (self._logs / component).open("wb") as output:
            process = subprocess.Popen(
                [str(BIN / "ray"), "start", *words],
                env=self._environment(container),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        pod = Pod(process, container, ports)
        self._started.append(pod)
        self.wait_until(lambda: pod.probe("startupProbe") == 200, component)
        return pod

    def deploy(self, pod: Pod) -> None:
        """What KubeRay's operator does with the render's Serve config: it gives it to the head's dashboard."""
        config = serve_config(self._manifests)
        config["http_options"] = {"host": "127.0.0.1", "port": self.http}
        config["grpc_options"]["port"] = self.grpc
        own = {"model": str(self._model), "arena_dir": str(self._folder), "store_host": "127.0.0.1"}
        own |= {"metrics_port": self.metrics}
        config["applications"][0]["args"] |= own
        file = self._logs / "serve.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        subprocess.run(
            [str(BIN / "serve"), "deploy", "-a", f"http://127.0.0.1:{pod.ports[8265]}", str(file)],
            env=self._environment(pod.container),
            check=True,
            capture_output=True,
        )

    def answer(self) -> str:
        """The text that a client gets."""
        body = {"prompt": "The headrace carries water", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/v1/completions",
            json.dumps(body | {"model": self._models()[0]}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["choices"][0]["text"]

    def _models(self) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v1/models", timeout=60) as reply:
            return [model["id"] for model in json.load(reply)["data"]]

    def clusters_of_workers(self) -> list[str]:
        """What each worker says of where it runs."""
        with Redis.from_url(self._redis_url) as redis:
            found = [decode_record(redis.get(key).partition(b":")[2]) for key in redis.scan_iter("hr1:{members}:m:*")]
        return [record.ray_cluster for record in found if isinstance(record, WorkerRecord)]

    def lose_redis(self) -> None:
        self._valkey.stop()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds():
            ended = [pod for pod in self._started if pod.process.poll() is not None]
            logs = "".join(path.read_text(errors="replace") for path in self._logs.iterdir())
            assert not ended, logs
            assert time.monotonic() < until, f"{what}: {logs}"
            time.sleep(0.1)

    def end(self) -> None:
        """At once: what a pod does when it is asked to end is another test's matter."""
        for pod in self._started:
            if pod.process.poll() is None:
                ours = psutil.Process(pod.process.pid)
                for process in [*ours.children(recursive=True), ours]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            pod.process.wait()
        self._valkey.stop()

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "HEADRACE_"))}
        theirs = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
        return (
            mine
            | theirs
            | {
                "HEADRACE_REDIS_URL": self._redis_url,
                "HOME": str(self._folder),
                "OMP_NUM_THREADS": "1",
                # Ray's own patience with a node that starts is half a minute, which a busy machine may need.
                "RAY_raylet_start_wait_time_s": "300",
                "RAY_CLUSTER_NAME": CLUSTER,  # as KubeRay says it
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self._token,
            }
        )


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Release]:
    # Not pytest's folder: the paths of Ray's sockets must be short.
    folder = Path("/tmp") / f"headrace-chart-{secrets.token_hex(4)}"
    folder.mkdir()
    release = Release(folder, tmp_path_factory.mktemp("logs"), tiny_model)
    try:
        yield release
    finally:
        release.end()
        shutil.rmtree(folder, ignore_errors=True)


def test_probes_tell_what_is_true_of_a_release_from_its_first_pod_to_a_lost_redis(release: Release):
    """Fails for a path or a port that is not there, for readiness before a worker could answer, for aliveness that
    Redis or Headrace decides, and for a probe that cannot fail."""
    gateway = release.start_pod("gateway", head=True)
    # The head's own probes, of the same processes.
    (head,) = ray_pods(render(VALUES))["head"]["spec"]["containers"]
    as_head = Pod(gateway.process, head, gateway.ports)
    assert [as_head.probe(kind) for kind in ("startupProbe", "livenessProbe", "readinessProbe")] == [200, 200, 200]

    # Ray runs, nothing is deployed: alive, and not ready.
    assert gateway.probe("livenessProbe") == 200
    assert gateway.probe("readinessProbe") == 0
    # The dashboard's port is the operator's way in: without the token nobody deploys.
    assert gateway.status("/api/serve/applications/", 8265) == 401
    assert gateway.status("/api/jobs/", 8265) == 401

    # A gateway, and no pod yet for the worker: the process says that it lives, and that no request could be served.
    release.deploy(gateway)
    release.wait_until(lambda: gateway.status("/health", 8000) == 200, "the gateway's process")
    assert gateway.probe("readinessProbe") == 503
    assert gateway.status("/-/healthz", 8000) == 200  # Serve's own says less: its proxy runs

    assert gateway.status("/metrics", 9401) == 200
    assert status("/metrics", release.metrics + 2) == 0
    worker = release.start_pod("both", head=False)
    release.wait_until(lambda: gateway.probe("readinessProbe") == 200, "a worker that has loaded its model")
    release.wait_until(lambda: worker.probe("readinessProbe") == 200, "the worker's pod")
    expected = release.answer()
    assert release.clusters_of_workers() == [CLUSTER]  # by which gateways of another one leave them alone

    # Far below what the chart allows by default, for a model of nearly nothing: what is left is for a model and its KV.
    for pod in (gateway, worker):
        limit = pod.container["resources"]["limits"]["memory"]
        assert pod.memory_bytes() < 0.75 * float(limit.removesuffix("Gi")) * 2**30

    release.lose_redis()
    assert release.answer() == expected
    for pod in (gateway, worker):
        assert pod.probe("livenessProbe") == 200
        assert pod.probe("readinessProbe") == 200

    # The worker's Ray stalls: its pod is to start again, and no other.
    (raylet,) = (p for p in psutil.Process(worker.process.pid).children(recursive=True) if p.name() == "raylet")
    raylet.suspend()
    try:
        release.wait_until(lambda: worker.probe("livenessProbe") != 200, "aliveness that fails")
        assert gateway.probe("livenessProbe") == 200
    finally:
        raylet.resume()
