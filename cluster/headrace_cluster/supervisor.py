"""The process that a local system lives in: it starts the parts in order, waits until they serve, and stops them.

Owns the order of start and stop, the private Ray, and the embedded index's restart. Runs detached; speaks to the one
who launched it by lines in `progress.log` and by `state.json`. It must not touch any other Ray on this machine: it
joins none (`address="local"`), its session lies in a directory of its own, its ports are free ones.
"""

import json
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from ray.serve._private.common import ReplicaState
from ray.serve.schema import LoggingConfig

from headrace.client.prepare_call import CHANNEL_OPTIONS, call_metadata
from headrace.compose import arena_path, own_disk_path
from headrace.config import ClusterSettings, Config, NetworkSettings, config_to_flat, load_config
from headrace.core.errors import HeadraceError
from headrace.index.embedded_valkey import EmbeddedValkey, EmbeddedValkeyFailed
from headrace.telemetry.logs import set_up_logs
from headrace.transfer.channels import open_blocking_channel
from headrace.transfer.check_network import is_loopback, name_to_call
from headrace.transfer.tls_files import tls_of_client
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from headrace_cluster.hold_port import hold_port
from headrace_cluster.local_instance import CONFIG_FILE, PROGRESS_FILE, InstanceState, write_state
from headrace_cluster.serve_app import APP_NAME, GRPC_SERVICER_FUNCTIONS, REPLICA_CPUS, SHUTDOWN_GRACE_S, build_app
from headrace_cluster.store_actor import stop_store_actors
from headrace_cluster.tenants_copy import TenantsCopy

log = logging.getLogger(__name__)

# Loading a large model from a slow disk takes minutes; a deployment that is not up by then never will be.
READY_TIMEOUT_S = 600.0
# A progress line at least this often while something is waited for.
PROGRESS_EVERY_S = 5.0
POLL_S = 0.2
CALL_TIMEOUT_S = 10.0
# The first generation compiles and warms everything once.
FIRST_GENERATE_TIMEOUT_S = 60.0
# Ray's object store carries nothing of ours (KV blocks go through the arena); this is Ray's own minimum.
OBJECT_STORE_BYTES = 80 * 1024 * 1024
# A line for each request would fill the log without end; metrics count requests.
RUN_OPTIONS: dict[str, Any] = {"route_prefix": "/", "logging_config": LoggingConfig(enable_access_log=False)}


class Stopped(BaseException):
    """SIGTERM: unwind what was started. A BaseException, so that nothing on the way takes it for a failure."""


class Supervisor:
    """One local system, from start to stop."""

    def __init__(self, state_dir: Path, instance_id: str) -> None:
        self._state_dir = state_dir
        self._progress = open(state_dir / PROGRESS_FILE, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._began_at = time.monotonic()
        self._index: EmbeddedValkey | None = None
        self._tenants: TenantsCopy | None = None
        self._api_key = ""
        settings = json.loads((state_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        if not settings["node_id"]:
            # Two instances on one host must not share an arena.
            settings["node_id"] = f"{socket.gethostname()}-{instance_id}"
        self._config = load_config(settings, environ={})
        set_up_logs(self._config.telemetry.log_format, part="supervisor", instance_id=instance_id)
        called_by = tls_to_call(self._config.network)
        self._tls = tls_of_client(**called_by)
        self._state = InstanceState(
            instance_id=instance_id,
            pid=os.getpid(),
            ready=False,
            http_url="",
            grpc_target="",
            redis_url="",
            arena_path=str(arena_path(self._config.store)),
            ray_temp_dir="",
            started=(),
            **{f"tls_{name}": path for name, path in called_by.items()},
            disk_path=str(own_disk_path(self._config.store) or ""),
        )

    def run(self) -> int:
        """Start, serve until SIGTERM, stop. Returns the exit status."""
        stop_on_sigterm()
        try:
            with ExitStack() as parts:
                self._start(parts)
                self._wait_until_ready()
                self._record(ready=True)
                parts.callback(self._record, ready=False)
                self._serve()
        except Stopped:
            self._say("stopped")
            return 0
        except Exception as error:
            log.error("the system does not start", exc_info=error)
            self._say(
                str(error) if isinstance(error, HeadraceError | StartFailed) else f"{type(error).__name__}: {error}"
            )
            return 1
        return 0

    def _start(self, parts: ExitStack) -> None:
        """Each part is put on the stack as it is started, so that they end in the opposite order."""
        self._record()
        gateway = self._config.gateway
        http_port = self._port("http_port", gateway.http_host, gateway.http_port, parts)
        grpc_port = self._port("grpc_port", gateway.http_host, gateway.grpc_port, parts)
        if not self._config.index.redis_url:
            self._index = EmbeddedValkey()
            redis_url = self._index.start()
            parts.callback(self._index.stop)
            self._config = replace(self._config, index=replace(self._config.index, redis_url=redis_url))
            self._started("index (embedded Valkey)", redis_url=redis_url)
        else:
            self._record(redis_url=self._config.index.redis_url)

        temp_dir = tempfile.mkdtemp(prefix="headrace-")  # short: Ray puts socket paths of 60 characters below it
        self._record(ray_temp_dir=temp_dir)
        if gateway.tenants_file:
            self._tenants = TenantsCopy(
                gateway.tenants_file, directory=Path(temp_dir), instance_id=self._state.instance_id
            )
            self._api_key = self._tenants.key
            self._config = replace(self._config, gateway=replace(gateway, tenants_file=self._tenants.path))
        start_private_ray(temp_dir, self._config)
        parts.callback(ray.shutdown)
        stop_on_sigterm()  # ray.init puts its own handler there
        self._started("Ray")
        parts.callback(stop_store_actors)

        parts.callback(serve.shutdown)
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": gateway.http_host, "port": http_port, **https_options(self._config.network)},
            grpc_options={"port": grpc_port, "grpc_servicer_functions": GRPC_SERVICER_FUNCTIONS},
        )
        host, scheme = name_to_call(self._config, gateway.http_host), "https" if self._tls is not None else "http"
        self._started("Serve", http_url=f"{scheme}://{host}:{http_port}", grpc_target=f"{host}:{grpc_port}")
        app = build_app(config_to_flat(self._config), grace_s=SHUTDOWN_GRACE_S)
        serve.run_many(
            [serve.RunTarget(target=app, name=APP_NAME, **RUN_OPTIONS)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _wait_until_ready(self) -> None:
        """All replicas run, every worker and the store node are registered, and one token was generated."""
        cluster = self._config.cluster
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        self._wait_for("workers to load the model", give_up_at, replicas_missing)
        channel = open_blocking_channel(self._state.grpc_target, tls=self._tls, options=CHANNEL_OPTIONS)
        metadata = call_metadata(self._api_key)
        try:
            admin = admin_pb2_grpc.CacheAdminStub(channel)
            self._wait_for("all members to register", give_up_at, lambda: members_missing(admin, cluster, metadata))
            self._wait_for("gateways to know them", give_up_at, lambda: gateways_unready(channel, cluster.gateways))
            self._say("generating a first token")
            self._wait_for("a first token", give_up_at, lambda: first_token_missing(channel, metadata))
        finally:
            channel.close()
        self._say(f"ready: {self._state.http_url} (HTTP), {self._state.grpc_target} (gRPC)")
        gateway = self._config.gateway
        if not gateway.tenants_file and is_loopback(gateway.http_host):
            self._say("there is no tenants_file, so no key is asked for: this system listens on loopback only")

    def _wait_for(self, what: str, give_up_at: float, missing: Callable[[], str]) -> None:
        """Poll `missing()` until it returns "", telling what it returns when that changes."""
        told, told_at = "", 0.0
        while still := missing():
            now = time.monotonic()
            if now > give_up_at:
                raise StartFailed(f"waited {READY_TIMEOUT_S:.0f} s for {what}: {still}")
            if still != told or now > told_at + PROGRESS_EVERY_S:
                self._say(f"waiting for {what}: {still}")
                told, told_at = still, now
            time.sleep(POLL_S)

    def _serve(self) -> None:
        """Until SIGTERM. An index that died is started again on its port, empty; its holders register anew. A tenants
        file that changed is copied to the gateways."""
        while True:
            time.sleep(1.0)
            wrong = self._tenants.follow() if self._tenants is not None else ""
            if wrong:
                log.warning("%s", wrong)
            if self._index is not None and not self._index.alive():
                log.warning("the embedded index died; starting it again")
                try:
                    self._index.start()
                except EmbeddedValkeyFailed as error:  # tried again in a second; until then lookups miss
                    log.warning("%s", error)

    def _port(self, key: str, host: str, wanted: int, parts: ExitStack) -> int:
        """As `hold_port`, for as long as the parts run."""
        port = int(parts.enter_context(hold_port(key, host, wanted)).getsockname()[1])
        if wanted not in (0, port):
            self._say(f"port {wanted} is taken; using {port} for {key}")
        return port

    def _started(self, part: str, **known: str) -> None:
        self._say(f"started {part}")
        self._record(started=(*self._state.started, part), **known)

    def _record(self, **known: Any) -> None:
        self._state = replace(self._state, **known)
        write_state(self._state_dir, self._state)

    def _say(self, line: str) -> None:
        text = f"[{time.monotonic() - self._began_at:5.1f} s] {line}"
        self._progress.write(text + "\n")
        print(text, flush=True)


class StartFailed(RuntimeError):
    """A part did not come up; the message holds its own error."""


def https_options(network: NetworkSettings) -> dict[str, str]:
    """What Serve's `http_options` say of TLS; the gRPC API goes by the same (`proxy_tls.py`)."""
    if not network.tls_cert_file:
        return {}
    files = {"ssl_keyfile": network.tls_key_file, "ssl_certfile": network.tls_cert_file}
    return files | ({"ssl_ca_certs": network.tls_client_ca_file} if network.tls_client_ca_file else {})


def tls_to_call(network: NetworkSettings) -> dict[str, str]:
    """The files by which somebody on this machine calls the gateway; all empty for plain text."""
    if not network.tls_cert_file:
        return {"ca_file": "", "cert_file": "", "key_file": ""}
    return {
        # Without authorities of ours the certificate itself is what is to be met, whoever signed it.
        "ca_file": network.tls_ca_file or network.tls_cert_file,
        "cert_file": network.tls_cert_file if network.tls_client_ca_file else "",
        "key_file": network.tls_key_file if network.tls_client_ca_file else "",
    }


def start_private_ray(temp_dir: str, config: Config) -> None:
    """A Ray of our own. Books only as many cores as the replicas need: Ray starts one idle worker for each."""
    replicas = config.cluster.prefill_workers + config.cluster.decode_workers + config.cluster.gateways
    ray.init(
        address="local",
        _temp_dir=temp_dir,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_cpus=math.ceil(replicas * REPLICA_CPUS),
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=True,
        namespace=APP_NAME,
    )


def replicas_missing() -> str:
    """Which deployments do not run fully yet; "" when all do. Raises StartFailed with a replica's own error."""
    app = serve.status().applications.get(APP_NAME)
    if app is None:
        return "the application to be created"
    if app.status == "DEPLOY_FAILED":
        messages = [d.message for d in app.deployments.values() if d.status == "DEPLOY_FAILED"] or [app.message]
        raise StartFailed(last_error(messages[0]))
    if app.status == "RUNNING":
        return ""
    states = {name: deployment.replica_states for name, deployment in sorted(app.deployments.items())}
    counts = ", ".join(
        f"{name} {by_state.get(ReplicaState.RUNNING, 0)} of {sum(by_state.values()) or '?'}"
        for name, by_state in states.items()
    )
    return counts or "the deployments to be created"


def members_missing(
    admin: admin_pb2_grpc.CacheAdminStub, wanted: ClusterSettings, metadata: tuple[tuple[str, str], ...]
) -> str:
    """What has not registered in the index yet; "" when all has."""
    try:
        status = admin.Status(admin_pb2.StatusRequest(), timeout=CALL_TIMEOUT_S, metadata=metadata)
    except grpc.RpcError as error:
        return f"the gateway answers {error.code().name}: {error.details()}"
    counts = (
        (len(status.workers), wanted.prefill_workers + wanted.decode_workers, "workers"),
        (len(status.store_nodes), 1, "store nodes"),
        (len(status.gateways), wanted.gateways, "gateways"),
    )
    return ", ".join(f"{there} of {all_} {what}" for there, all_, what in counts if there < all_)


def gateways_unready(channel: grpc.Channel, num_gateways: int) -> str:
    """What one of the gateways says that cannot serve yet; "" when none does. Serve chooses whom it asks: so often that
    hardly any gateway is passed over."""
    health = health_pb2_grpc.HealthStub(channel)
    try:
        for _ in range(1 if num_gateways == 1 else 8 * num_gateways):
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                return "one of them does not yet"
    except grpc.RpcError as error:
        return f"one of them answers {error.code().name}: {error.details()}"
    return ""


def first_token_missing(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> str:
    """Generate one token; why that cannot be done yet, "" when it was. Raises StartFailed when it never will be."""
    request = inference_pb2.GenerateRequest(
        text="Hello",
        sampling=inference_pb2.Sampling(max_tokens=1),
        cache=inference_pb2.CacheOptions(bypass=True, no_publish=True),
    )
    try:
        events = inference_pb2_grpc.InferenceStub(channel).Generate(
            request, timeout=FIRST_GENERATE_TIMEOUT_S, metadata=metadata
        )
        if not any([event.HasField("done") for event in events]):  # noqa: C419 - read to the end, cancel nothing
            raise StartFailed("the first generation ended without a result")
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:  # a worker or a gateway that has just gone, or just come
            return str(error.details())
        raise StartFailed(f"the first generation failed: {error.code().name}: {error.details()}") from error
    return ""


def last_error(message: str) -> str:
    """The exception at the end of a remote traceback, without its module's path."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Refused|Invalid|Failed|Unavailable)\b", line)]
    line = (errors or lines or ["it gave no reason"])[-1].strip()
    return re.sub(r"^(\w+\.)+(?=\w+:)", "", line)


def stop_on_sigterm() -> None:
    """SIGTERM raises Stopped in the main thread, once: a second one must not cut the clean-up short."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    sys.exit(Supervisor(Path(sys.argv[1]), sys.argv[2]).run())
