"""The Ray Serve application: gateways as its ingress, prefill workers, decode workers.

Owns how many replicas of what Serve runs, with which resources, limits and health rules. `serve_app` is what a Serve
config file names as its `import_path`.
"""

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from headrace.config import Config, config_to_flat, load_config
from headrace.core.errors import ConfigInvalid
from headrace.core.limits import GATEWAY_INFLIGHT_MAX, REQUEST_TIMEOUT_MS_DEFAULT, WORKER_WAITING_MAX
from headrace.core.members import WorkerRole
from headrace.torch_environment import TORCH_ENVIRONMENT
from headrace.transfer.check_network import check_network, is_loopback
from headrace_cluster.gateway_replica import GatewayReplica
from headrace_cluster.proxy_tls import serve_http_options
from headrace_cluster.store_actor import config_here
from headrace_cluster.worker_replica import DecodeWorker, PrefillWorker

log = logging.getLogger(__name__)

APP_NAME = "headrace"

# The gRPC services that Serve's proxies accept and list by reflection.
GRPC_SERVICER_FUNCTIONS = [
    "headrace_cluster.proxy_services.add_inference",
    "headrace_cluster.proxy_services.add_cache_admin",
    "headrace_cluster.proxy_services.add_health",
]

# A replica is asked for its health this often. One whose process died is replaced at once, one that says no three times
# in a row after that: 6 s.
HEALTH_PERIOD_S = 2.0
# No answer for this long counts as a no: then the event loop is stalled and not busy, since engines step in threads of
# their own. Three of them are 90 s.
HEALTH_TIMEOUT_S = 30.0
# How long streams under way hold up the end of a system on one machine, whose operator waits for it.
SHUTDOWN_GRACE_S = 10.0
# A load that lasts so long is answered by more workers; a model takes about as long to load.
SCALE_OUT_AFTER_S = 15.0
# A lull that lasts so long ends workers, whose caches end with them: what they published stays in the store nodes.
SCALE_IN_AFTER_S = 300.0
# Over how long a worker's pressure is averaged: longer than the 10 s between two reports of it.
SCALE_LOOK_BACK_S = 20.0
# A replica that is replaced, or not needed any more, gets no new calls, and ends when its last stream has, or after the
# longest that a request may take by default.
REPLICA_GRACE_S = REQUEST_TIMEOUT_MS_DEFAULT / 1000
# Calls beyond what the engine runs and queues are refused by the worker itself (Overloaded), at once and with a reason;
# Serve would let them wait. So Serve's own bound lies above the worker's.
CALLS_BEYOND_QUEUE = 64
# Share of a core that Serve books for a replica. Small on purpose: workers compute in turns, and a worker, a gateway
# and a prefill worker must fit on a machine of two cores.
REPLICA_CPUS = 0.1

# Settings that hold a password may come from the environment of the Ray nodes instead of the arguments: Ray's dashboard
# shows a Serve config to whoever may open it.
SECRET_VARIABLES = ("HEADRACE_REDIS_URL",)

# Of the processes of workers.
WORKER_ENVIRONMENT = {**TORCH_ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false"}


def serve_app(args: dict[str, Any]) -> Application:
    """The application for these settings (`config.py`'s names); `redis_url` is required here, or in the environment.

    Raises ConfigInvalid naming the key.
    """
    return build_app(args, grace_s=REPLICA_GRACE_S)


def build_app(args: dict[str, Any], *, grace_s: float) -> Application:
    """As `serve_app`. grace_s: how long a replica's streams may go on when it is to end; one that scaling ends has
    REPLICA_GRACE_S always."""
    config = load_config(args, environ={name: os.environ[name] for name in SECRET_VARIABLES if name in os.environ})
    check_listening(config)
    settings = config_to_flat(config)
    options = worker_options(config)
    decode_role = WorkerRole.DECODE if config.cluster.prefill_workers else WorkerRole.BOTH
    cluster = config.cluster
    decode = DecodeWorker.options(
        **options, **replicas(cluster.decode_workers, cluster.decode_workers_max, grace_s=grace_s)
    )
    prefill = PrefillWorker.options(
        **options, **replicas(max(1, cluster.prefill_workers), cluster.prefill_workers_max, grace_s=grace_s)
    )
    return Gateway.options(num_replicas=cluster.gateways, graceful_shutdown_timeout_s=grace_s).bind(
        settings,
        decode.bind(settings, decode_role.value),
        prefill.bind(settings, WorkerRole.PREFILL.value) if config.cluster.prefill_workers else None,
    )


def check_listening(config: Config) -> None:
    """As `check_network`, as far as it is known here: Serve listens where its `http_options` say, the parts on their
    Ray nodes' addresses. Raises ConfigInvalid."""
    options = serve_http_options()
    if options is None:  # a config file is looked at, and nothing will listen; each part asks again when it starts
        check_network(config)
        return
    here = config_here(config_to_flat(config))
    check_network(here, front_door=options.host or "")
    if here.network.tls_cert_file and not options.ssl_certfile and not is_loopback(options.host or ""):
        log.warning(
            "callers are served on %s in plain text, keys included: where no proxy before it ends their TLS, give "
            "Serve's http_options ssl_certfile and ssl_keyfile (docs/tls.md)",
            options.host or "every interface",
        )
    check_ray(here, os.environ)


def check_ray(config: Config, environ: Mapping[str, str]) -> None:
    """Refuse TLS between the parts beside Ray's own connections in plain text, on which prompts go from gateways to
    workers. config: with the address of its Ray node. environ: what that was started with. Raises ConfigInvalid."""
    network, plain = config.network, environ.get("RAY_USE_TLS", "0") in ("", "0", "false")
    if network.tls_ca_file and plain and not network.insecure_network and not is_loopback(config.store.store_host):
        raise ConfigInvalid(
            "tls_ca_file",
            "Ray's own connections, by which gateways call workers, are in plain text: set RAY_USE_TLS=1, "
            "RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT in the environment of every Ray node "
            "(docs/tls.md), or insecure_network: true",
        )


def replicas(fixed: int, most: int, *, grace_s: float) -> dict[str, Any]:
    """Serve options for a number of workers that stays, or one that follows the load from `fixed` to `most`."""
    if most <= fixed:
        return {"num_replicas": fixed, "graceful_shutdown_timeout_s": grace_s}
    scaling = AutoscalingConfig(
        min_replicas=fixed,
        initial_replicas=fixed,
        max_replicas=most,
        upscale_delay_s=SCALE_OUT_AFTER_S,
        downscale_delay_s=SCALE_IN_AFTER_S,
        look_back_period_s=SCALE_LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function="headrace_cluster.scale_workers:scale_workers"),
    )
    return {"autoscaling_config": scaling, "graceful_shutdown_timeout_s": REPLICA_GRACE_S}


def worker_options(config: Config) -> dict[str, Any]:
    """Serve options that both kinds of worker share."""
    actor = {
        "num_cpus": REPLICA_CPUS,
        "num_gpus": gpus_per_worker(config),
        "runtime_env": {"env_vars": WORKER_ENVIRONMENT},
    }
    return {
        "ray_actor_options": actor,
        "max_ongoing_requests": config.engine.batch_sequences_max + WORKER_WAITING_MAX + CALLS_BEYOND_QUEUE,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": 1,
        "request_router_config": RequestRouterConfig(
            request_router_class="headrace_cluster.plan_request_router:PlanRequestRouter"  # type: ignore[arg-type]
        ),
    }


def gpus_per_worker(config: Config) -> float:
    """What Ray books for each worker, by the GPUs that its cluster has now; 0 on machines without."""
    if config.model.device == "cpu" or not ray.is_initialized():
        return 0.0
    cluster = config.cluster
    prefill = max(cluster.prefill_workers, cluster.prefill_workers_max)
    decode = max(cluster.decode_workers, cluster.decode_workers_max)
    return gpu_share(int(ray.cluster_resources().get("GPU", 0.0)), prefill + decode)


def gpu_share(gpus: int, workers: int) -> float:
    """A whole GPU for each worker where there are enough, else an equal share, such that all find a place: what one
    worker has lies on one GPU."""
    if gpus == 0 or gpus >= workers:
        return float(gpus > 0)
    workers_on_each = -(-workers // gpus)
    return math.floor(10_000 / workers_on_each) / 10_000  # Ray counts in ten-thousandths


Gateway = serve.deployment(
    name="Gateway",
    max_ongoing_requests=2 * GATEWAY_INFLIGHT_MAX,
    health_check_period_s=HEALTH_PERIOD_S,
    health_check_timeout_s=HEALTH_TIMEOUT_S,
    max_constructor_retry_count=1,
    ray_actor_options={"num_cpus": REPLICA_CPUS},
)(GatewayReplica)
