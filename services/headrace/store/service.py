"""The store node as a service: arena, recovery, gRPC server, registration and liveness, started and stopped in order.

`python -m headrace.store.service --redis-url ...` runs one node until SIGTERM or SIGINT. When it is ready it prints its
record as one line of JSON. The arena's file stays when the process ends, so that the next start finds the blocks again;
`--remove-arena-on-exit`, or `remove_arena()` after the process is gone, leaves nothing behind.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from dataclasses import asdict, replace
from pathlib import Path

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.blocks.disk_tier import DiskTier, disk_path, open_disk, remove_disk
from headrace.blocks.host_arena import HostArena, arena_path, host_id, open_arena
from headrace.config import Config, StoreSettings, load_config, settings_table
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import ConfigInvalid, HeadraceError, IndexUnavailable, InvalidRequest, StoreUnavailable
from headrace.core.eviction import PolicyName
from headrace.core.limits import (
    BUDGETS_MAX,
    EXPIRY_SCAN_MS,
    LEASE_TTL_MS,
    MEMBER_TTL_MS,
    RESERVATION_TTL_MS,
    STOP_GRACE_MS,
)
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import BlockIndex, Membership
from headrace.core.store_limits import BACKGROUND_REMOVALS_MAX, NODE_STALL_MS
from headrace.store.announce_node import announce_node
from headrace.store.block_changes import BlockChanges, TellEach
from headrace.store.budgets_file import BudgetsFile
from headrace.store.cache_admin import CacheAdminOfNode
from headrace.store.disk_mover import DiskMover
from headrace.store.drain_node import nothing_on_disk
from headrace.store.end_when_stalled import end_when_stalled
from headrace.store.kv_events import KvEvents
from headrace.store.node_admin import NodeAdmin
from headrace.store.node_drain import NodeDrain
from headrace.store.node_metrics import NodeMetrics
from headrace.store.node_rules import NodeRules
from headrace.store.recover_arena import recover_arena
from headrace.store.recover_disk import RecoveredDisk, recover_disk
from headrace.store.register_blocks import PendingChanges, register_blocks
from headrace.store.removal_log import RemovalLog
from headrace.store.store_node import StoreNode
from headrace.store.sweep_index import sweep_index
from headrace.telemetry.logs import set_up_logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.refused_calls import reason_of
from headrace.telemetry.tracing import Tracing, start_tracing
from headrace.transfer.channels import bind_server, build_server
from headrace.transfer.check_network import check_network
from headrace.transfer.https_context import HttpsContext, metrics_context
from headrace.transfer.serve_blocks import serve_blocks
from headrace.transfer.tls_files import Tls, tls_of_parts
from headrace.transfer.trace_rpcs import TracedRpcs
from headrace.wire.v1 import admin_pb2_grpc

_log = logging.getLogger(__name__)
_HEALTH_NAMES = ("", "headrace.v1.BlockStore", "headrace.v1.CacheAdmin")


class StoreNodeService:
    """One store node's process-wide parts. `start` and `stop` once each, on one event loop."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        index: BlockIndex,
        membership: Membership,
        clock: Clock,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
        tls: Tls | None = None,
        metrics_context: HttpsContext | None = None,
        lease_ttl_ms: int = LEASE_TTL_MS,
        reservation_ttl_ms: int = RESERVATION_TTL_MS,
    ) -> None:
        """metrics: serves them on a port of its own when given. tls: what this node shows and whom it lets in; None for
        plain text. metrics_context: what makes its metrics HTTPS. The times to live: as in `NodeRules`."""
        self._settings = settings
        self._node_id = settings.node_id or socket.gethostname()
        self._index = index
        self._membership = membership
        self._clock = clock
        self._metrics = metrics
        self._tracing = tracing
        self._tls = tls
        self._metrics_context = metrics_context
        self._rules = NodeRules(
            eviction_policy=PolicyName(settings.eviction_policy),
            pin_share=settings.pin_share,
            lease_ttl_ms=lease_ttl_ms,
            reservation_ttl_ms=reservation_ttl_ms,
        )
        self._changes = PendingChanges()
        self._removals = RemovalLog(clock)
        self._kv_events = (
            KvEvents(settings, node_id=self._node_id, clock=clock) if settings.kv_events_endpoint else None
        )
        self._server = build_server(
            interceptors=() if tracing is None else (TracedRpcs(tracing),),
            tell=lambda error, peer: self._count_refused(error),
        )
        self._health = health.aio.HealthServicer()
        self._background: asyncio.Task[None] | None = None
        self._node_metrics: NodeMetrics | None = None
        self._address = ""
        self._arena: HostArena | None = None
        self._node: StoreNode | None = None
        self._disk: DiskTier | None = None
        self._mover: DiskMover | None = None

    @property
    def node(self) -> StoreNode:
        """The node's books; after `start`."""
        assert self._node is not None, "not started"
        return self._node

    @property
    def kv_events(self) -> KvEvents:
        """What followers of this node connect to; only where `kv_events_endpoint` is set."""
        assert self._kv_events is not None, "no KV events"
        return self._kv_events

    @property
    def record(self) -> StoreNodeRecord:
        """What is announced; after `start`."""
        return StoreNodeRecord(
            node_id=self._node_id,
            incarnation=self.node.incarnation,
            host=host_id(self._settings.arena_dir),
            address=self._address,
            arena_path=str(self._arena_path),
            pid=os.getpid(),
            metrics_port=self._node_metrics.port if self._node_metrics else 0,
            draining=self.node.draining,
        )

    async def start(self) -> StoreNodeRecord:
        """Open the arena, find what it holds, serve, announce. Raises ConfigInvalid; then nothing is left open.

        While Redis is away it asks once and does not wait: a node serves whoever knows its address.
        """
        self._arena = open_arena(self._arena_path, self._settings.arena_mb << 20)
        try:
            self._node = self._find_again(self._arena)
            budgets = self._adopt_budgets()
            self._address = self._bind()
            self._add_servicers(self._node, budgets)
            if self._metrics is not None:
                self._node_metrics = NodeMetrics(
                    self._node, self._metrics, settings=self._settings, context=self._metrics_context
                )
            if self._kv_events is not None:
                self._kv_events.begin(self.node.incarnation)
            await self._server.start()
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)
            with contextlib.suppress(IndexUnavailable):  # so that whoever waits for it finds it among the members
                await self._announce()
        except BaseException:
            try:
                await self._server.stop(None)
            finally:
                self._close(remove_arena=False)
            raise
        self._changes.want_restart()  # its first announcement, or the one that comes when the index is back
        self._background = asyncio.create_task(self._run_background(), name=f"store node {self._node_id}")
        return self.record

    async def stop(self, *, remove_arena: bool = False) -> None:
        """Leave the members, refuse new calls, let those in progress end, unmap. Idempotent."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._background is not None:
            if self._mover is not None and not remove_arena:
                with contextlib.suppress(StoreUnavailable):  # what is not taken in time is lost
                    await self._mover.settle()
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)
            self._background = None
            try:
                await self._membership.withdraw(self.record)
            except IndexUnavailable:
                _log.warning("the record was not withdrawn; it ends by itself in %d ms", MEMBER_TTL_MS)
        if self._node is not None:
            self._node.waiters.close()
        await self._server.stop(STOP_GRACE_MS / 1_000)
        if self._mover is not None:
            await self._mover.stop()
        self._close(remove_arena=remove_arena)

    async def failed(self) -> None:
        """Wait until background work dies of a bug, and raise that. For whoever keeps the process alive."""
        assert self._background is not None
        await asyncio.shield(self._background)

    def _find_again(self, arena: HostArena) -> StoreNode:
        """The node with all that the arena and the disk hold of earlier runs."""
        recovered, disk = recover_arena(arena), self._open_disk()
        node = StoreNode(
            arena,
            node_id=self._node_id,
            clock=self._clock,
            changes=self._followers(),
            recovered=recovered,
            disk=disk,
            rules=self._rules,
        )
        _log.info("arena: %d blocks found again, freed: %s", len(recovered.blocks), recovered.freed or "none")
        node.room.because = node.disk.because = self._removals.because
        if self._disk is not None:
            self._mover = DiskMover(node, self._disk, self._clock)
        return node

    def _add_servicers(self, node: StoreNode, budgets: BudgetsFile) -> None:
        """Whoever is called by other processes."""
        mover = self._mover
        read_disk = mover.read if mover else nothing_on_disk
        serve_blocks(self._server, node, promote=mover.promote if mover else None, tell=self._count_refused)
        admin = CacheAdminOfNode(
            node,
            self._membership,
            lambda: self.record,
            self._removals,
            settle=mover.settle if mover else None,
            clock=self._clock,
        )
        of_node = NodeAdmin(
            node,
            self._removals,
            want_registration=self._changes.want_restart,
            drain=NodeDrain(node, clock=self._clock, announce=self._announce, read_disk=read_disk, tls=self._tls),
            save_budgets=budgets.write,
            read_disk=read_disk,
        )
        admin_pb2_grpc.add_NodeAdminServicer_to_server(of_node, self._server)  # type: ignore[no-untyped-call]
        admin_pb2_grpc.add_CacheAdminServicer_to_server(admin, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def _followers(self) -> BlockChanges:
        kv_events = () if self._kv_events is None else (self._kv_events.log,)
        return TellEach(self._changes, self._removals, *kv_events)

    def _close(self, *, remove_arena: bool) -> None:
        if self._kv_events is not None:
            self._kv_events.close()
        if self._node_metrics is not None:
            self._node_metrics.close()
        if self._arena is not None:
            if remove_arena:
                BudgetsFile(self._arena_path).remove()
                self._arena.remove()
            self._arena.close()
            self._arena = None
        if self._disk is not None:
            self._disk.close()
            self._disk = None
            if remove_arena and not self._settings.disk_dir:
                remove_disk(disk_path("", self._node_id))

    @property
    def _arena_path(self) -> Path:
        return arena_path(self._settings.arena_dir, self._node_id)

    def _open_disk(self) -> RecoveredDisk | None:
        """The disk tier and what it holds; None when it is off."""
        if self._settings.disk_gb == 0:
            return None
        self._disk = open_disk(disk_path(self._settings.disk_dir, self._node_id), int(self._settings.disk_gb * 2**30))
        disk = recover_disk(self._disk)
        _log.info("disk: %d records found again, freed: %s", len(disk.found), disk.freed or "none")
        return disk

    def _adopt_budgets(self) -> BudgetsFile:
        """Put the budgets of the run before in force. Minima that this arena is too small for protect nothing."""
        file, room = BudgetsFile(self._arena_path), self.node.room
        budgets = file.read()
        try:
            room.set_budgets(budgets)
        except InvalidRequest as refused:
            _log.warning("no protected minimum is in force: %s", refused)
            room.set_budgets(replace(budget, bytes_min=0) for budget in budgets[:BUDGETS_MAX])
        return file

    async def _run_background(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scan())
            tasks.create_task(self._evict_ahead())
            if self._mover is not None:
                tasks.create_task(self._mover.run())
            if self._kv_events is not None:
                tasks.create_task(self._kv_events.run())
            tasks.create_task(register_blocks(self.node, self._changes, self._index, announce=self._announce))
            tasks.create_task(announce_node(lambda: self.record, self._changes, self._membership, clock=self._clock))
            tasks.create_task(sweep_index(self._index, self._membership, clock=self._clock))

    async def _scan(self) -> None:
        """End what is over, and keep the numbers that are scraped."""
        while True:
            self.node.expire()
            if self.node.has_due:  # a step is bounded; the next one follows as soon as others had their turn
                await asyncio.sleep(0)
                continue
            if self._node_metrics is not None:
                self._node_metrics.look()
            await asyncio.sleep(EXPIRY_SCAN_MS / 1_000)

    async def _evict_ahead(self) -> None:
        """Have room before it is needed, a bounded step at a time."""
        while True:
            wanted = 0.0 if self.node.draining else self._settings.free_share  # nothing new comes to a node that drains
            removed = self.node.room.evict_ahead(wanted)
            await asyncio.sleep(0 if removed == BACKGROUND_REMOVALS_MAX else EXPIRY_SCAN_MS / 1_000)

    async def _announce(self) -> None:
        await self._membership.announce(self.record, ttl_ms=MEMBER_TTL_MS)

    async def _set_health(self, status: int) -> None:
        for name in _HEALTH_NAMES:
            await self._health.set(name, status)

    def _bind(self) -> str:
        wanted = f"{self._settings.store_host}:{self._settings.store_port}"
        try:
            connected = None if self._metrics is None else self._metrics.tls_connections.inc
            port = bind_server(self._server, wanted, tls=self._tls, connected=connected)
        except RuntimeError as error:
            raise ConfigInvalid("store_port", f"cannot listen on {wanted}") from error
        return f"{self._settings.store_host}:{port}"

    def _count_refused(self, error: Exception) -> None:
        """A worker, or whoever takes itself for one, asked for what this node does not do."""
        if self._metrics is not None:
            self._metrics.refused_calls.labels(reason_of(error)).inc()


async def serve_store_node(
    service: StoreNodeService,
    *,
    stop: asyncio.Event,
    log_format: str,
    remove_arena_on_exit: bool = False,
    stall_ms: int = NODE_STALL_MS,
) -> None:
    """Run a service until `stop` is set or its background work dies; print its record when it is ready. A process whose
    event loop stands still for `stall_ms` is killed; what is left to do when it ends counts, too."""
    record = await service.start()
    print(json.dumps(asdict(record)), flush=True)
    turning = asyncio.create_task(
        end_when_stalled(log_format=log_format, node_id=record.node_id, stall_ms=stall_ms), name="look for stalls"
    )
    ends = {asyncio.create_task(stop.wait()), asyncio.create_task(service.failed()), turning}
    try:
        ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        await service.stop(remove_arena=remove_arena_on_exit)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the process; exit code 2 when a setting is refused."""
    parser = argparse.ArgumentParser(prog="python -m headrace.store.service", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=None, help="YAML file of settings.")
    parser.add_argument("--remove-arena-on-exit", action="store_true", help="Delete the arena's file on SIGTERM.")
    names = [
        name for name, (piece, _) in settings_table().items() if piece in ("store", "index", "network", "telemetry")
    ]
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=settings_table()[name][1].metadata["help"])
    parsed = parser.parse_args(arguments)
    set_up_logs("text", part="store node")
    try:
        config = load_config({name: getattr(parsed, name) for name in names}, config_file=parsed.config)
        name = config.store.node_id or socket.gethostname()
        set_up_logs(config.telemetry.log_format, part="store node", instance_id=name)
        if not config.index.redis_url:
            raise ConfigInvalid("redis_url", "a store node on its own needs a Redis to register with")
        check_network(config)
        asyncio.run(_run(config, remove_arena_on_exit=parsed.remove_arena_on_exit))
    except HeadraceError as error:
        _log.error("%s", error)
        return 2
    return 0


async def _run(config: Config, *, remove_arena_on_exit: bool) -> None:
    # Here and not at the top: a node inside another process is given its index, and then needs no Redis client.
    from headrace.index.redis_index import RedisIndex
    from headrace.index.redis_membership import RedisMembership

    clock, redis_url = SystemClock(), config.index.redis_url
    index, membership = RedisIndex(redis_url, clock=clock), RedisMembership(redis_url, clock=clock)
    tracing = start_tracing(config.telemetry.otlp_endpoint, part="store", instance_id=config.store.node_id)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    service = StoreNodeService(
        config.store,
        index=index,
        membership=membership,
        clock=clock,
        metrics=Metrics(),
        tracing=tracing,
        tls=tls_of_parts(config.network),
        metrics_context=metrics_context(config.network),
    )
    try:
        await serve_store_node(
            service,
            stop=stop,
            log_format=config.telemetry.log_format,
            remove_arena_on_exit=remove_arena_on_exit,
        )
    finally:
        await index.close()
        await membership.close()
        if tracing is not None:
            await tracing.close()


if __name__ == "__main__":
    raise SystemExit(main())
