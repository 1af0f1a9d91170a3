"""A whole system without Ray for attacks: both front doors with tenants, a store node behind them, all of it real but
the engine; and the keys of a victim, of an attacker and of an operator.

Time bounds are small behind `impatient_url` only, so that nothing else depends on how fast anything is.
"""

import asyncio
import contextlib
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import uvicorn
import yaml
from tiny_gateway import NODE, TinyGateway, make_worker_record, tiny_gateway

from headrace.admin.create_certificates import create_certificates
from headrace.config import GatewaySettings, StoreSettings
from headrace.core.block import HashAlgorithm
from headrace.core.clock import Deadline, SystemClock
from headrace.core.tenants import HashedKey, new_key
from headrace.gateway.openai_http import build_http_app
from headrace.gateway.serve_grpc import serve_grpc
from headrace.gateway.tenants_file import TenantsFile
from headrace.store.service import StoreNodeService
from headrace.telemetry.gateway_metrics import GatewayMetrics
from headrace.telemetry.metrics import Metrics
from headrace.transfer.channels import Channels
from headrace.transfer.https_context import HttpsContext
from headrace.transfer.tls_files import Tls, TlsFiles
from headrace.wire.v1 import admin_pb2_grpc, block_store_pb2_grpc, inference_pb2_grpc
from headrace_cluster.bounded_http import BoundedHttp

LEASE_TTL_MS = 50
VICTIM, ATTACKER, BUSY, OPERATOR = "victim", "attacker", "busy", "operator"
PROMPT = "the victim's prompt of forty characters."


@dataclass
class AttackedSystem:
    """What an attacker can reach, and what the defender counts."""

    url: str
    impatient_url: str
    grpc_port: int
    impatient_grpc_port: int
    grpc_channel: grpc.aio.Channel
    store_channel: grpc.aio.Channel
    gateway: TinyGateway
    store: StoreNodeService
    keys: dict[str, str]
    gateway_metrics: Metrics
    store_metrics: Metrics
    directory: Path
    https_url: str
    ended: list[str] = field(default_factory=list)  # why the HTTP server ended connections
    refused: list[str] = field(default_factory=list)  # and why the HTTPS server refused some

    def as_(self, tenant: str) -> dict[str, str]:
        """The header or metadata of a tenant's key."""
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60)

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.grpc_channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.CacheAdminStub(self.grpc_channel)

    @property
    def block_store(self) -> Any:
        return block_store_pb2_grpc.BlockStoreStub(self.store_channel)

    def counts(self) -> dict[str, float]:
        """Every counter by its spelled-out name and labels, and the ended connections."""
        counted = {}
        for metrics in (self.gateway_metrics, self.store_metrics):
            for family in metrics.registry.collect():
                for sample in family.samples:
                    if sample.name.endswith("_total") and not sample.name.startswith("process_"):
                        labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                        name = f"{sample.name}{{{labels}}}" if labels else sample.name
                        counted[name] = counted.get(name, 0.0) + sample.value
        for family, reasons in (("http_connections_ended", self.ended), ("refused_connections", self.refused)):
            for reason in reasons:
                name = f'headrace_{family}{{reason="{reason}"}}'
                counted[name] = counted.get(name, 0.0) + 1
        return counted

    async def at_rest(self) -> None:
        """Wait until nothing is under way for anybody."""
        async with asyncio.timeout(60):
            while self.gateway.service.inflight:  # noqa: ASYNC110 - nobody tells when a server has noticed
                await asyncio.sleep(0.01)
        self.gateway.assert_at_rest()


@asynccontextmanager
async def attacked_system(model_path: str, directory: Path):
    """The system, started."""
    keys = {name: new_key() for name in (VICTIM, ATTACKER, BUSY, OPERATOR)}
    rows = [{"name": name, "keys": [HashedKey.of(key).spell()]} for name, key in keys.items()]
    rows[2]["requests_per_minute"] = 1
    rows[3]["role"] = "admin"
    (directory / "tenants.yaml").write_text(yaml.safe_dump({"tenants": rows}))
    clock, gateway_metrics, store_metrics = SystemClock(), Metrics(), Metrics()
    ended, refused = [], []
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(
            tiny_gateway(
                make_worker_record("d0"),
                model_path=model_path,
                settings=GatewaySettings(local_prefill_tokens=8, hash_algorithm=HashAlgorithm.SHA256),
                keys=TenantsFile(directory / "tenants.yaml"),
                requests=GatewayMetrics(gateway_metrics),
            )
        )
        await gateway.service.tokenizers.get(model_path, deadline=Deadline.after(120, clock))
        store = StoreNodeService(
            StoreSettings(node_id="n1", arena_mb=1, arena_dir=str(directory)),
            index=gateway.service.index,
            membership=gateway.membership,
            clock=clock,
            metrics=store_metrics,
            lease_ttl_ms=LEASE_TTL_MS,
        )
        await gateway.membership.withdraw(NODE)
        await store.start()
        stack.push_async_callback(store.stop, remove_arena=True)
        channels = Channels()
        stack.push_async_callback(channels.close)
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
        stack.push_async_callback(server.stop, 0)
        impatient, impatient_port = await serve_grpc(
            gateway.service,
            address="127.0.0.1:0",
            channel_to=channels.to,
            message_timeout_ms=50,
            unread_timeout_ms=50,
        )
        stack.push_async_callback(impatient.stop, 0)
        app = build_http_app(gateway.service)
        urls = []
        for bounds in ({}, {"head_timeout_ms": 50, "body_timeout_ms": 50, "unread_timeout_ms": 50}):
            protocol = type("Counted", (SmallBuffers,), {**bounds, "ended": staticmethod(ended.append)})
            urls.append(await stack.enter_async_context(_served(app, protocol)))
        pem = create_certificates(directory / "front-door", hosts=["127.0.0.1"], days=1)
        files = TlsFiles(cert_file=pem.cert_file, key_file=pem.key_file)
        https = HttpsContext(Tls(files), refused=refused.append)
        https_url = await stack.enter_async_context(_served(app, BoundedHttp, https))
        yield AttackedSystem(
            url=urls[0],
            impatient_url=urls[1],
            grpc_port=port,
            impatient_grpc_port=impatient_port,
            grpc_channel=await stack.enter_async_context(_channel(f"127.0.0.1:{port}")),
            store_channel=await stack.enter_async_context(_channel(store.record.address)),
            gateway=gateway,
            store=store,
            keys=keys,
            gateway_metrics=gateway_metrics,
            store_metrics=store_metrics,
            directory=directory,
            https_url=https_url,
            ended=ended,
            refused=refused,
        )


class SmallBuffers(BoundedHttp):
    """The kernel keeps little of what nobody reads, so that little has to be made."""

    def connection_made(self, transport):
        """As BoundedHttp's."""
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        super().connection_made(transport)


def _channel(address: str) -> grpc.aio.Channel:
    """An attacker's: it sends what it likes."""
    return grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])


@asynccontextmanager
async def _served(app, protocol, https: HttpsContext | None = None):
    context = None if https is None else lambda config, default: https
    options = {"port": 0, "log_level": "critical", "lifespan": "off", "http": protocol, "ssl_context_factory": context}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    server.install_signal_handlers = lambda: None
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
        yield f"http{'s' if https else ''}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
