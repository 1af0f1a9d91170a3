"""Where the parts meet: the one place that builds adapters and joins them to the ports that the services ask for.

Every process of a system is made by one of three functions: `build_store_node`, `build_worker`, `build_gateway`. Each
returns a whole part with `start` and `stop`, whose order of steps can be read here. Settings come in as a Config; what
runs these parts (Ray, a test, a plain process) is not known here, and the heavy imports wait until a part is built.
"""

import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from headrace.blocks.disk_tier import disk_path
from headrace.blocks.host_arena import arena_path as arena_path_of
from headrace.blocks.host_arena import host_id
from headrace.config import DEFAULT_MODEL, Config, EngineSettings, GatewaySettings, ModelSettings, StoreSettings
from headrace.core.block import HashAlgorithm
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import InvalidRequest
from headrace.core.generation import (
    ControlReport,
    DecodeCall,
    DecodeEvent,
    DeviceListing,
    EvictReport,
    EvictSelector,
    PrefillCall,
    PrefillResult,
    WorkerId,
)
from headrace.core.members import WorkerRecord, WorkerRole
from headrace.core.ports import WorkerCalls

log = logging.getLogger(__name__)

Report = Callable[[str], None]


def prepare_model(settings: ModelSettings, *, report: Report) -> None:
    """Have the built-in model's files on this machine before workers ask for them, with progress; once per machine.

    Any other model is loaded by the workers themselves; here one is refused that they could not serve, as far as that
    can be told at once. Raises ModelRefused with the remedy.
    """
    if settings.model == DEFAULT_MODEL:
        from headrace.engine.convert_gguf import model_cache_dir, prepare_default_model

        prepare_default_model(model_cache_dir(settings), report=report)
    else:
        from headrace.engine.check_model import check_model

        check_model(settings)


def check_drafter(model: ModelSettings, engine: EngineSettings) -> None:
    """Refuse a draft model that no worker could use, as far as that can be told at once. Raises ConfigInvalid."""
    from headrace.engine.check_model import check_draft_model

    check_draft_model(model, engine)


def check_tenants(settings: GatewaySettings) -> None:
    """Refuse a tenants file that a gateway could not use, before anything starts. Raises ConfigInvalid."""
    if settings.tenants_file:
        from headrace.gateway.read_tenants import read_tenants

        read_tenants(settings.tenants_file)


def arena_path(settings: StoreSettings) -> Path:
    """The file in which this host's store node keeps its blocks."""
    return arena_path_of(settings.arena_dir, node_id(settings))


def own_disk_path(settings: StoreSettings) -> Path | None:
    """The directory of this host's store node that goes when its system is taken down; None where the disk tier is off
    or its place was chosen, since what lies there is to be found again."""
    return None if settings.disk_dir or not settings.disk_gb else disk_path("", node_id(settings))


def node_id(settings: StoreSettings) -> str:
    """The store node's stable name: as set, else the host's."""
    return settings.node_id or socket.gethostname()


class Worker:
    """One worker as the process sees it: both kinds of call, of which its role takes one or both."""

    def __init__(self, worker: Any, *, role: WorkerRole, parts: AsyncExitStack, tracing: Any) -> None:
        self._worker = worker  # transfer/worker.py:Worker
        self._role = role
        self._tracing = tracing
        self._parts = parts

    async def start(self) -> None:
        """Be ready, then be seen."""
        await self._worker.start()

    async def stop(self) -> None:
        """Be unseen, drain, stop, then close connections and the metrics endpoint. Idempotent."""
        await self._worker.stop()
        await self._parts.aclose()

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """As `prefill_prompt`; InvalidRequest on a worker whose role takes no prefill calls."""
        from headrace.prefill.prefill_prompt import prefill_prompt
        from headrace.telemetry.served_calls import served_prefill

        if not self._role.prefills:
            raise InvalidRequest("this worker takes no prefill calls", param="prefill_worker")
        return await served_prefill(call, prefill_prompt(call, self._worker), tracing=self._tracing)

    def decode(self, call: DecodeCall) -> AsyncGenerator[DecodeEvent, None]:
        """As `decode_tokens`: close it to cancel; InvalidRequest on a worker whose role takes no decode calls."""
        from headrace.decode.decode_tokens import decode_tokens
        from headrace.telemetry.served_calls import served_decode

        if not self._role.decodes:
            raise InvalidRequest("this worker takes no decode calls", param="decode_worker")
        return served_decode(call, decode_tokens(call, self._worker), tracing=self._tracing)

    def evict_device(self, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Evict from this worker's pool; the report says what was done in fact."""
        report: EvictReport = self._worker.evict_device(selector, dry_run=dry_run)
        return report

    def list_device(self, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """What this worker's pool holds."""
        listing: DeviceListing = self._worker.list_device(selector, limit=limit)
        return listing

    def set_device_ttl(self, selector: EvictSelector, *, ttl_s: float | None) -> ControlReport:
        """Have a prefix go from this worker's pool at a moment, or take that back."""
        report: ControlReport = self._worker.set_device_ttl(selector, ttl_s=ttl_s)
        return report

    def healthy(self) -> bool:
        """Whether a call sent now can be served."""
        return bool(self._worker.healthy())

    def record(self) -> WorkerRecord:
        """Who it is and how loaded it is now."""
        record: WorkerRecord = self._worker.record()
        return record


def build_worker(config: Config, *, role: WorkerRole, worker_id: WorkerId, ray_cluster: str = "") -> Worker:
    """Load the model, logging the progress, and join it to this host's store node and the index. Blocks while loading.

    ray_cluster: of several with one index, that of the gateways that can call it. Raises ModelRefused, ConfigInvalid.
    """
    from headrace.engine.load_model import load_model

    model = load_model(
        config.model,
        config.engine,
        trust_group=config.gateway.trust_group,
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=log.info,
    )
    return join_worker(model, config, role=role, worker_id=worker_id, ray_cluster=ray_cluster)


def join_worker(model: Any, config: Config, *, role: WorkerRole, worker_id: WorkerId, ray_cluster: str = "") -> Worker:
    """As `build_worker`, for a `LoadedModel` that the caller has loaded; it belongs to this worker from here on."""
    from headrace.engine.engine import Engine
    from headrace.engine.load_drafter import load_drafter
    from headrace.index.redis_membership import RedisMembership
    from headrace.telemetry.collectors import EngineCollector, SpeculationCollector, WorkerCollector
    from headrace.telemetry.metered_ports import MeteredStoreNodes
    from headrace.telemetry.metrics import Metrics
    from headrace.telemetry.traced_ports import TracedStoreNodes
    from headrace.transfer.check_network import check_network
    from headrace.transfer.store_nodes import StoreNodeTable
    from headrace.transfer.tls_files import tls_of_parts
    from headrace.transfer.worker import Worker as TransferWorker
    from headrace.transfer.worker_member import WorkerPlace

    check_network(config)
    clock, metrics, parts = SystemClock(), Metrics(), AsyncExitStack()
    drafter = load_drafter(model, config.model, config.engine, clock=clock, report=log.info) if role.decodes else None
    engine = Engine(model, config.engine, clock=clock, drafter=drafter)
    host = host_id(config.store.arena_dir)
    membership = RedisMembership(config.index.redis_url, clock=clock)
    parts.push_async_callback(membership.close)
    metrics_port = _serve_metrics(config, metrics, parts)
    tracing = _start_tracing(config, parts, part="worker", instance_id=worker_id)
    table = StoreNodeTable(
        host=host,
        membership=membership,
        clock=clock,
        report_fault=metrics.count_fault,
        tls=tls_of_parts(config.network),
    )
    nodes = MeteredStoreNodes(table, metrics=metrics)
    worker = TransferWorker(
        WorkerPlace(worker_id, role, host, metrics_port=metrics_port, ray_cluster=ray_cluster),
        engine,
        nodes=nodes if tracing is None else TracedStoreNodes(nodes, tracing=tracing),
        node_table=table,
        membership=membership,
        clock=clock,
        report_fault=metrics.count_fault,
        load_patience_ms=config.engine.load_patience_ms,
    )
    WorkerCollector(worker.record, metrics=metrics)
    EngineCollector(lambda: _counts_of(engine), role=role, metrics=metrics)
    if drafter is not None:
        SpeculationCollector(engine.speculation, metrics=metrics)
    return Worker(worker, role=role, parts=parts, tracing=tracing)


def _serve_metrics(config: Config, metrics: Any, parts: AsyncExitStack) -> int:
    """Serve a worker's or a gateway's metrics for as long as its parts last; the port."""
    from headrace.telemetry.collectors import CertificateCollector
    from headrace.telemetry.metrics_server import other_metrics_ports, start_metrics_server
    from headrace.transfer.https_context import metrics_context

    context, ports = metrics_context(config.network), other_metrics_ports(config.store.metrics_port)
    if context is not None:
        CertificateCollector(lambda: context.ends_unix_s, metrics=metrics)
    server = start_metrics_server(metrics.registry, config.store.store_host, ports, context=context)
    parts.callback(server.close)
    return server.port


def _start_tracing(config: Config, parts: AsyncExitStack, *, part: str, instance_id: str) -> Any:
    """As `start_tracing`; what it made ends with the parts, before what they were made of."""
    from headrace.telemetry.tracing import start_tracing

    tracing = start_tracing(config.telemetry.otlp_endpoint, part=part, instance_id=instance_id)
    if tracing is not None:
        parts.push_async_callback(tracing.close)
    return tracing


def _counts_of(engine: Any) -> Any:
    from headrace.telemetry.collectors import EngineCounts

    steps, block_tokens = engine.steps, engine.kv.layout.block_tokens
    return EngineCounts(
        steps=steps.num_steps,
        preemptions=steps.num_preemptions,
        reloads=steps.preemption.num_reloads,
        reloaded_tokens=steps.preemption.num_reloaded_blocks * block_tokens,
        shared_tokens=steps.num_shared_blocks * block_tokens,
    )


class Gateway:
    """One gateway as the process sees it: the HTTP app and the servicers of the three gRPC services."""

    def __init__(
        self,
        *,
        service: Any,
        http_app: Any,
        inference: Any,
        admin: Any,
        health: Any,
        start_peers: Callable[[], Awaitable[None]],
        index_known: Callable[[], Awaitable[None]],
        parts: AsyncExitStack,
    ) -> None:
        self.http_app = http_app
        self.inference = inference
        self.admin = admin
        self.health = health
        self._service = service
        self._start_peers = start_peers
        self._index_known = index_known
        self._parts = parts

    async def start(self) -> None:
        """Be there for other gateways, know the workers, what they hold and their models' tokenizers; then be ready."""
        await self._start_peers()
        await self._service.start()
        await self._index_known()
        await self._service.tokenizers.loaded()

    def healthy(self) -> bool:
        """As GatewayService.healthy."""
        return bool(self._service.healthy())

    async def stop(self) -> None:
        """Stop following the workers, be unseen, then close connections. Idempotent."""
        await self._service.stop()
        await self._parts.aclose()


def build_gateway(config: Config, *, calls: WorkerCalls, gateway_id: str = "", ray_cluster: str = "") -> Gateway:
    """Join a gateway to the index, the members, the other gateways and the workers behind `calls`.

    gateway_id: its name among the members; drawn when it has none. ray_cluster: where those workers are.
    Raises ConfigInvalid (tenants_file)."""
    from prometheus_client import generate_latest

    from headrace.gateway.admin_grpc import CacheAdminRpc
    from headrace.gateway.budget_carrier import BudgetCarrier
    from headrace.gateway.fleet import Fleet
    from headrace.gateway.inference_grpc import HealthRpc, InferenceRpc
    from headrace.gateway.known_keys import NO_KEYS
    from headrace.gateway.observers import Observers
    from headrace.gateway.openai_http import build_http_app
    from headrace.gateway.peer_gateways import PeerGateways
    from headrace.gateway.refuse_call import refuse_by_raising, refuse_call
    from headrace.gateway.service import Backend, GatewayService
    from headrace.gateway.tenants_file import TenantsFile
    from headrace.index.redis_membership import RedisMembership
    from headrace.telemetry.gateway_metrics import GatewayMetrics
    from headrace.telemetry.metrics import Metrics
    from headrace.transfer.channels import Channels
    from headrace.transfer.check_network import check_network
    from headrace.transfer.tls_files import tls_of_parts

    check_network(config)
    tls = tls_of_parts(config.network)
    clock, metrics, parts, channels = SystemClock(), Metrics(), AsyncExitStack(), Channels(tls)
    gateway_id = gateway_id or secrets.token_hex(6)
    tracing = _start_tracing(config, parts, part="gateway", instance_id=gateway_id)
    mirror = _mirror_index(config, clock, metrics, parts)
    membership = RedisMembership(config.index.redis_url, clock=clock)
    for close in (membership.close, channels.close):
        parts.push_async_callback(close)
    metrics_port = _serve_metrics(config, metrics, parts)
    observer, tenants_file = GatewayMetrics(metrics), config.gateway.tenants_file
    index, calls = _observed(mirror, calls, tracing=tracing, metrics=metrics, clock=clock)
    service = GatewayService(
        Backend(index=index, membership=membership, calls=calls, ray_cluster=ray_cluster),
        config.gateway,
        clock=clock,
        keys=TenantsFile(tenants_file) if tenants_file else NO_KEYS,
        observers=Observers(routes=observer, requests=observer, tracing=tracing),
    )
    peers = PeerGateways(
        service.membership,  # which remembers whom it has told of
        gateway_id=gateway_id,
        host=config.store.store_host,
        host_id=host_id(config.store.arena_dir),
        metrics_port=metrics_port,
        clock=clock,
        tls=tls,
    )
    parts.push_async_callback(peers.stop)
    service.run_beside(BudgetCarrier(Fleet(service, channel_to=channels.to)).step)
    service.run_beside(mirror.follow)
    service.run_beside(peers.step)
    remembering = CacheAdminRpc(service, channel_to=channels.to, refuse=refuse_call, counted=False)
    return Gateway(
        service=service,
        http_app=build_http_app(
            service,
            metrics_text=lambda: generate_latest(metrics.registry),
            keyless_at_home=not config.network.insecure_network,
            allowed_origins=config.gateway.allowed_origins,
        ),
        inference=InferenceRpc(service, refuse=refuse_by_raising),
        admin=CacheAdminRpc(service, channel_to=channels.to, refuse=refuse_by_raising, peers=peers),
        health=HealthRpc(service, refuse=refuse_by_raising),
        start_peers=lambda: peers.start(remembering),
        index_known=mirror.settled,
        parts=parts,
    )


def _observed(index: Any, calls: WorkerCalls, *, tracing: Any, metrics: Any, clock: Clock) -> tuple[Any, WorkerCalls]:
    """The index and the calls of workers, traced where there is tracing; calls are counted, too."""
    from headrace.telemetry.metered_ports import MeteredWorkerCalls
    from headrace.telemetry.traced_ports import TracedBlockIndex, TracedWorkerCalls

    if tracing is not None:
        index, calls = TracedBlockIndex(index, tracing=tracing), TracedWorkerCalls(calls, tracing=tracing)
    return index, MeteredWorkerCalls(calls, metrics=metrics, clock=clock)


def _mirror_index(config: Config, clock: Clock, metrics: Any, parts: AsyncExitStack) -> Any:
    """The gateway's mirror over the index in Redis; both close with its parts."""
    from headrace.index.index_mirror import IndexMirror
    from headrace.index.redis_index import RedisIndex
    from headrace.telemetry.metered_ports import MeteredBlockIndex
    from headrace.telemetry.mirror_collector import MirrorCollector

    index = RedisIndex(config.index.redis_url, clock=clock)
    mirror = IndexMirror(MeteredBlockIndex(index, metrics=metrics, clock=clock), config.index.redis_url, clock=clock)
    for close in (index.close, mirror.close):
        parts.push_async_callback(close)
    MirrorCollector(mirror.stat, metrics=metrics)
    return mirror


class StoreNode:
    """One store node as the process sees it."""

    def __init__(self, *, service: Any, config: Config, parts: AsyncExitStack) -> None:
        self._service = service
        self._config = config
        self._parts = parts

    async def start(self) -> None:
        """Find again what the arena holds, serve, announce. Raises ConfigInvalid."""
        await self._service.start()

    async def failed(self) -> None:
        """Wait until the node's background work dies of a bug, and raise that."""
        await self._service.failed()

    async def end_when_stalled(self) -> None:
        """Until cancelled: have this process killed when its event loop stands still."""
        from headrace.store.end_when_stalled import end_when_stalled

        await end_when_stalled(log_format=self._config.telemetry.log_format, node_id=node_id(self._config.store))

    async def stop(self, *, remove_arena: bool) -> None:
        """Withdraw, stop serving, close. Idempotent."""
        await self._service.stop(remove_arena=remove_arena)
        await self._parts.aclose()


def build_store_node(config: Config) -> StoreNode:
    """Join this host's store node to the index and the members."""
    from headrace.index.redis_index import RedisIndex
    from headrace.index.redis_membership import RedisMembership
    from headrace.store.service import StoreNodeService
    from headrace.telemetry.metered_ports import MeteredBlockIndex
    from headrace.telemetry.metrics import Metrics
    from headrace.transfer.check_network import check_network
    from headrace.transfer.https_context import metrics_context
    from headrace.transfer.tls_files import tls_of_parts

    check_network(config)
    clock, metrics, parts = SystemClock(), Metrics(), AsyncExitStack()
    index = RedisIndex(config.index.redis_url, clock=clock)
    membership = RedisMembership(config.index.redis_url, clock=clock)
    for close in (index.close, membership.close):
        parts.push_async_callback(close)
    service = StoreNodeService(
        config.store,
        index=MeteredBlockIndex(index, metrics=metrics, clock=clock),
        membership=membership,
        clock=clock,
        metrics=metrics,
        tls=tls_of_parts(config.network),
        metrics_context=metrics_context(config.network),
        tracing=_start_tracing(config, parts, part="store", instance_id=node_id(config.store)),
    )
    return StoreNode(service=service, config=config, parts=parts)
