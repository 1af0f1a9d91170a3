"""The store node of a host as a detached Ray actor: one per Ray node, in a process of its own.

Owns when a store node is started, where it runs and that Ray starts it again after its process died, or was killed
because it stood still; then it re-attaches the arena, which outlives it. Workers ensure it when they start, so it is
the same on one machine and in a cluster. What a store node does is in `store/`.

`python -m headrace_cluster.store_actor` ends all store nodes of the Ray cluster that RAY_ADDRESS names: they outlive
`serve shutdown` on purpose, and keep the settings that they were started with.
"""

import asyncio
import logging
import os
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.config import Config, config_to_flat, load_config, settings_table

log = logging.getLogger(__name__)

STORE_NAMESPACE = "headrace"
STORE_NAME_PREFIX = "headrace-store:"
# A store node opens its arena and announces itself. After a crash it checks each committed slot first, which takes
# about a second for 2 GB: it may take two.
STORE_START_TIMEOUT_S = 60.0
STORE_CHECK_MB_PER_S = 1_024
# The pieces of the settings that a store node goes by.
STORE_PIECES = ("store", "index", "network")
STORE_STOP_TIMEOUT_S = 10.0


class StoreActor:
    """Runs a store node for as long as the actor lives."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        from headrace.compose import build_store_node, node_id
        from headrace.telemetry.logs import set_up_logs

        self._settings = settings
        config = config_here(settings)
        set_up_logs(config.telemetry.log_format, part="store node", instance_id=node_id(config.store))
        self._node = build_store_node(config)
        await self._node.start()
        self._watch = asyncio.create_task(self._end_when_failed())

    async def ready(self) -> int:
        """Answers when the store node serves; its process id."""
        return os.getpid()

    async def differs_from(self, settings: dict[str, Any]) -> list[str]:
        """What it was started with otherwise than these settings say."""
        return differing(self._settings, settings)

    async def stop(self) -> None:
        """Withdraw from the index, close the server and remove the arena's file."""
        await self._node.stop(remove_arena=True)  # looked at until its end
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    async def _end_when_failed(self) -> None:
        """A node whose background work died serves no longer; a new process is worth more than a half-dead one, or than
        one that nobody looks at."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._node.failed())
                tasks.create_task(self._node.end_when_stalled())
        except Exception:
            log.critical("the store node's background work died; its process ends and is started again", exc_info=True)
            os._exit(1)


def config_here(settings: dict[str, Any]) -> Config:
    """The settings as they hold on this Ray node: `store_host: auto` becomes the node's own address."""
    if settings["store_host"] == "auto":
        settings = {**settings, "store_host": ray.util.get_node_ip_address()}
    return load_config(settings, environ={})


def differing(had: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The settings of a store node that are not the same in both."""
    of_store = (name for name, (piece, _) in settings_table().items() if piece in STORE_PIECES)
    return [name for name in of_store if had.get(name) != wanted.get(name)]


def ray_cluster_here() -> str:
    """The Ray cluster's name where KubeRay gave it one, which runs two with one index during an upgrade; else ""."""
    return os.environ.get("RAY_CLUSTER_NAME", "")


async def ensure_store_actor(config: Config) -> None:
    """Have a store node on this Ray node, starting it when there is none. Returns when it serves. One that is there
    keeps its settings: where they are others than these, the log says which."""
    node_id = ray.get_runtime_context().get_node_id()
    actor: Any = (
        ray.remote(StoreActor)
        .options(
            name=STORE_NAME_PREFIX + node_id,
            namespace=STORE_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(config_to_flat(config))
    )
    async with asyncio.timeout(start_timeout_s(config)):
        await actor.ready.remote()
        await tell_differences(actor, config_to_flat(config))


async def tell_differences(actor: Any, settings: dict[str, Any]) -> None:
    """Log which of these settings a store node does not have, or that it cannot say so."""
    try:
        others = await actor.differs_from.remote(settings)
    except (AttributeError, RayError) as error:  # the handle has the methods of the version that started the actor
        log.warning(
            "the store node of this host cannot say what it was started with, since an earlier version did it; "
            "it keeps that until it is ended (docs/ray.md): %s",
            error,
        )
        return
    if others:
        log.warning(
            "the store node of this host was started before, with another %s, and keeps that until it is ended "
            "(docs/ray.md); with another redis_url it is unknown here, and this worker stores elsewhere",
            ", ".join(others),
        )


def start_timeout_s(config: Config) -> float:
    """How long a store node may take to start: as long as its arena is full of blocks to check."""
    return STORE_START_TIMEOUT_S + config.store.arena_mb / STORE_CHECK_MB_PER_S


def stop_store_actors() -> None:
    """End the store node of every Ray node and remove its arena: the cache is gone after this.

    For the end of a system. To end workers alone, shut Serve down; store nodes outlive it on purpose.
    """
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["namespace"] == STORE_NAMESPACE]
    for name in names:
        if not name.startswith(STORE_NAME_PREFIX):
            continue
        actor = ray.get_actor(name, namespace=STORE_NAMESPACE)
        try:
            ray.get(actor.stop.remote(), timeout=STORE_STOP_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            print(f"{name} did not stop by itself and is killed: {error}", flush=True)
        ray.kill(actor, no_restart=True)


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    stop_store_actors()
