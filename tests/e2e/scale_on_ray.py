"""A script: deploy the Serve config file on a Ray of its own, scale it under streams, deploy a second application
beside it, and print what happened as JSON.

    python scale_on_ray.py REDIS_URL MODEL_DIRECTORY

It is a process of its own since Ray leaves much behind in the process that joins it.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import yaml
from click.testing import CliRunner
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

import headrace_cluster
from headrace.admin.cli import main as headrace
from headrace.client.client import HeadraceClient
from headrace.client.values import COLD, CacheOptions, Sampling
from headrace.core.errors import HeadraceError
from headrace.wire.v1 import inference_pb2
from headrace_cluster.hold_port import hold_free_port
from headrace_cluster.local_instance import INSTANCE_VARIABLE, processes_of
from headrace_cluster.proxy_http import CALLBACK, CALLBACK_VARIABLE
from headrace_cluster.serve_app import APP_NAME, GRPC_SERVICER_FUNCTIONS
from headrace_cluster.store_actor import stop_store_actors

CONFIG = yaml.safe_load((Path(headrace_cluster.__file__).parent / "serve_config.yaml").read_text(encoding="utf-8"))
WORKER_TITLE = "ray::ServeReplica:headrace:DecodeWorker"
OTHER = "other"
VARIABLE = "HEADRACE_APPLICATION"
STREAMS = 4
GRACE_S = 120  # streams end before
TOKENS = Sampling(max_tokens=400, ignore_eos=True)


class Deployed:
    """The application of the config file, with as many decode workers as were asked for last."""

    def __init__(self, redis_url: str, model: str, grpc_port: int) -> None:
        settings = {"redis_url": redis_url, "model": model, "prefill_workers": 0, "decode_workers": 2, "node_id": "ray"}
        tiny = {"dtype": "float32", "torch_threads": 1, "pool_tokens": 4_096, "block_tokens": 16, "arena_mb": 16}
        (app,) = CONFIG["applications"]
        self._app = app | {"args": app["args"] | settings | tiny}
        self.address = f"127.0.0.1:{grpc_port}"
        self.client = HeadraceClient(self.address)

    def scale(self, workers: int) -> None:
        """As `serve deploy` of the file with this section does."""
        section = {"name": "DecodeWorker", "num_replicas": workers, "graceful_shutdown_timeout_s": GRACE_S}
        apps = [self._app | {"deployments": [section]}]
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": apps}))

    def worker_ids(self) -> list[str]:
        return sorted(worker.worker_id for worker in self.client.status().workers)

    def streams(self, pool: ThreadPoolExecutor) -> list[Future[int]]:
        """Streams on each of the workers, begun when this returns; each comes to the number of its tokens, or -1."""

        def tokens(events: Any) -> int:
            try:
                return 1 + sum(1 for _ in events) - 1  # the first was read already, the last event is no token
            except HeadraceError as error:
                print(f"a stream was cut off: {error}", file=sys.stderr)
                return -1

        running = []
        for number, worker_id in enumerate(self.worker_ids() * (STREAMS // 2)):
            cache = CacheOptions(sources=COLD.sources, publish=False, decode_worker=worker_id)
            events = iter(self.client.stream([40 + number] * 20, sampling=TOKENS, cache=cache, timeout_s=300))
            next(events), next(events)  # accepted, and a token
            running.append(pool.submit(tokens, events))
        return running


def wait_until(holds: Callable[[], bool], what: str, *, within_s: float = 240) -> None:
    give_up_at = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {within_s} s: {what}"
        time.sleep(0.1)


def worker_pids() -> set[int]:
    everything = processes_of(os.environ[INSTANCE_VARIABLE])
    return {pid for pid, title in everything.items() if title.startswith(WORKER_TITLE)}


def is_running() -> bool:
    app = serve.status().applications.get(APP_NAME)
    assert app is None or app.status != "DEPLOY_FAILED", app
    return app is not None and app.status == "RUNNING"


def workers_by_state() -> dict[str, int]:
    states = serve.status().applications[APP_NAME].deployments["DecodeWorker"].replica_states
    return {str(getattr(state, "value", state)): count for state, count in states.items() if count}


def scale_with_one_starting(deployed: Deployed, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """2 workers serve; a third is asked for, hangs in its start, and is not wanted any more."""
    before, known = deployed.worker_ids(), worker_pids()
    streams = deployed.streams(pool)
    deployed.scale(3)
    wait_until(lambda: len(worker_pids()) == 3, "a third worker's process")
    (starting,) = worker_pids() - known
    os.kill(starting, signal.SIGSTOP)
    deployed.scale(2)
    wait_until(lambda: workers_by_state() == {"RUNNING": 2, "STOPPING": 1}, "one that is to end")
    os.kill(starting, signal.SIGCONT)
    wait_until(lambda: worker_pids() == known, "the end of the one that was starting")
    # It may have come as far as to announce itself.
    wait_until(lambda: deployed.worker_ids() == before, "the workers of before, and no other")
    return {
        "streams": [stream.result() for stream in streams],
    }


def scale_in(deployed: Deployed, pool: ThreadPoolExecutor) -> dict[str, Any]:
    """2 workers serve streams, and one of them is not wanted any more."""
    streams = deployed.streams(pool)
    deployed.scale(1)
    tokens = [stream.result() for stream in streams]
    wait_until(lambda: len(worker_pids()) == 1, "one worker left")
    wait_until(lambda: len(deployed.worker_ids()) == 1, "one worker known")
    after = deployed.client.generate([50] * 20, sampling=Sampling(max_tokens=4, ignore_eos=True), timeout_s=60)
    return {"streams": tokens, "answers_after": len(after.token_ids)}


@serve.deployment(ray_actor_options={"num_cpus": 0})
class OtherModel:
    """An application that answers as another Headrace would to one question."""

    async def ListModels(self, request: Any) -> Any:
        return inference_pb2.ListModelsReply(models=[inference_pb2.Model(id="another-model", context_tokens_max=64)])


def beside_another(deployed: Deployed) -> dict[str, Any]:
    """A second application behind the same proxies: whom `headrace models` reaches."""
    serve.run(OtherModel.bind(), name=OTHER, route_prefix=f"/{OTHER}")

    def models(application: str) -> Any:
        asked = ["models", "--address", deployed.address, "--json"]
        done = CliRunner().invoke(headrace, asked, env={VARIABLE: application})
        told = json.loads(done.stdout)
        return told["error"]["message"] if done.exit_code else [model["id"] for model in told["models"]]

    wait_until(lambda: isinstance(models(OTHER), list), "the second application behind the proxy")
    return {"of_the_file": models(APP_NAME), "second": models(OTHER), "unnamed": models(""), "unknown": models("third")}


def main(redis_url: str, model: str) -> None:
    os.environ[CALLBACK_VARIABLE] = CALLBACK
    with (
        tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as temp_dir,
        hold_free_port("127.0.0.1") as http,
        hold_free_port("127.0.0.1") as grpc,
    ):
        http_port, grpc_port = http.getsockname()[1], grpc.getsockname()[1]
        ray.init(
            address="local", _temp_dir=temp_dir, _node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=2,
            object_store_memory=80 * 1024 * 1024, log_to_driver=False,
        )  # fmt: skip
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": "127.0.0.1", "port": http_port},
                grpc_options={"port": grpc_port, "grpc_servicer_functions": GRPC_SERVICER_FUNCTIONS},
            )
            deployed = Deployed(redis_url, model, grpc_port)
            deployed.scale(2)
            wait_until(is_running, "the application to run")
            wait_until(lambda: len(deployed.worker_ids()) == 2, "two workers known")
            with ThreadPoolExecutor(STREAMS) as pool:
                happened = {
                    "while_starting": scale_with_one_starting(deployed, pool),
                    "scale_in": scale_in(deployed, pool),
                    "beside_another": beside_another(deployed),
                }
            deployed.client.close()
        finally:
            serve.shutdown()
            stop_store_actors()
            ray.shutdown()
    print(json.dumps(happened))


if __name__ == "__main__":
    main(*sys.argv[1:])
