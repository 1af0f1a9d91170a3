"""A gateway's admin service over real store nodes on gRPC and in-process workers, for several test files."""

from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from store_kit import StoreKit, make_kit
from tiny_gateway import NODE, TinyGateway, TinyWorker, make_namespace, make_worker_record, tiny_gateway

from headrace.core.block import HashedPrompt
from headrace.core.clock import Deadline, SystemClock
from headrace.core.members import StoreNodeRecord
from headrace.gateway.prepare_request import hash_for
from headrace.gateway.serve_grpc import serve_grpc
from headrace.store.cache_admin import CacheAdminOfNode
from headrace.store.node_admin import NodeAdmin
from headrace.store.node_drain import NodeDrain
from headrace.store.removal_log import RemovalLog
from headrace.transfer.channels import Channels, build_server
from headrace.transfer.serve_blocks import serve_blocks
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

WORKERS = (make_worker_record("d0", free_blocks=900), make_worker_record("d1"))


@dataclass
class Admin:
    """The gateway's admin stub and what lies behind it."""

    stub: Any
    gateway: TinyGateway
    kits: dict[str, StoreKit]
    address: str
    channel_to: Callable[[str], Any]

    async def evict(self, *, dry_run=False, **selector):
        reply = await self.stub.Evict(admin_pb2.EvictRequest(selector=selector, dry_run=dry_run))
        return {report.holder: report for report in reply.reports}

    async def list_blocks(self, *, with_text=False, limit=0, **selector):
        return await self.stub.ListBlocks(
            admin_pb2.ListBlocksRequest(selector=selector, with_text=with_text, limit=limit)
        )


@asynccontextmanager
async def admin_over(model_path, *node_ids, dead_nodes=(), namespace=None, **service_options):
    """A gateway over running store nodes of these names, and some that are announced but do not answer."""
    workers = [replace(worker, namespace=namespace) if namespace else worker for worker in WORKERS]
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(tiny_gateway(*workers, model_path=model_path, **service_options))
        if model_path:  # loaded here, since a busy machine takes longer than an admin call may
            await gateway.service.tokenizers.get(model_path, deadline=Deadline.after(60, SystemClock()))
        await gateway.membership.withdraw(NODE)
        kits = {}
        for node_id in node_ids:
            removals = RemovalLog(SystemClock())
            kit, server = make_kit(blocks=16, follower=removals, node_id=node_id), build_server()
            record = replace(NODE, node_id=node_id, address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            servicer = CacheAdminOfNode(
                kit.node, gateway.membership, lambda record=record: record, removals, clock=kit.clock
            )
            admin_pb2_grpc.add_CacheAdminServicer_to_server(servicer, server)
            drain = NodeDrain(kit.node, clock=SystemClock(), announce=_announce_drain(gateway, record, kit))
            of_node = NodeAdmin(kit.node, removals, want_registration=lambda: None, drain=drain)
            serve_blocks(server, kit.node)
            admin_pb2_grpc.add_NodeAdminServicer_to_server(of_node, server)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            await gateway.membership.announce(record, ttl_ms=60_000)
            kits[node_id] = kit
        for node_id in dead_nodes:
            await gateway.membership.announce(replace(NODE, node_id=node_id, address="127.0.0.1:9"), ttl_ms=60_000)
        channels = Channels()
        stack.push_async_callback(channels.close)
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
        stack.push_async_callback(server.stop, 0)
        address = f"127.0.0.1:{port}"
        yield Admin(admin_pb2_grpc.CacheAdminStub(channels.to(address)), gateway, kits, address, channels.to)


def _announce_drain(gateway: TinyGateway, record: StoreNodeRecord, kit: StoreKit) -> Any:
    """As a node's service does: the record, with whether it drains."""
    return lambda: gateway.membership.announce(replace(record, draining=kit.node.draining), ttl_ms=60_000)


def store_text(kit: StoreKit, text: str, *, salt: str = "", group: str = "") -> int:
    """Have a node hold the blocks of a text (one token a byte, as the test's tokenizer has it); returns how many."""
    prompt = prompt_of(text, salt=salt, group=group)
    return len(kit.store(prompt, range(len(prompt.chain))))


def keep_on_device(worker: TinyWorker, text: str, *, salt: str = "", group: str = "") -> int:
    """Have a worker's pool keep the blocks of a text for reuse; returns how many."""
    prompt = prompt_of(text, salt=salt, group=group)
    taken = worker.pool.take(len(prompt.chain))
    worker.pool.hash_blocks(prompt, taken.block_ids)
    worker.pool.unref_all(taken.block_ids)
    return len(prompt.chain)


def prompt_of(text: str, *, salt: str = "", group: str = "") -> HashedPrompt:
    """A text as the gateway hashes it for a tenant of that trust group."""
    return hash_for(make_namespace(), token_ids_of(text), cache_salt=salt, trust_group=group)


def token_ids_of(text: str) -> tuple[int, ...]:
    """Ids of printable ASCII under the byte-level tokenizer: its alphabet is sorted, id 0 ends a sequence."""
    return tuple(ord(c) - 32 for c in text)
