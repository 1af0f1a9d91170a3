"""Budgets of tenants over real store nodes, a real Valkey and gateways: set in one place, in force everywhere."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from patient_redis import patient_membership
from store_calls_kit import CLOCK, publish, read
from tiny_gateway import TinyCalls, make_namespace, make_worker_record

from headrace.blocks.host_arena import arena_path, budgets_path, remove_arena
from headrace.client import AsyncHeadraceClient
from headrace.config import GatewaySettings
from headrace.core.block import HashedPrompt
from headrace.core.budgets import TENANTS_FILE, Budget
from headrace.core.errors import InvalidRequest, PermissionDenied
from headrace.core.members import StoreNodeRecord
from headrace.core.tenants import HashedKey, new_key
from headrace.gateway.budget_carrier import BudgetCarrier
from headrace.gateway.fleet import Fleet
from headrace.gateway.known_keys import NO_KEYS
from headrace.gateway.prepare_request import hash_for
from headrace.gateway.serve_grpc import serve_grpc
from headrace.gateway.service import Backend, GatewayService
from headrace.gateway.tenants_file import TenantsFile
from headrace.index.memory_index import MemoryIndex
from headrace.transfer.channels import Channels
from headrace.wire.parse import parse_budget
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

MIB = 1 << 20
BLOCKS_PER_MIB = 256  # a block of the kit takes one unit of 4 KiB
KEYS = {name: new_key() for name in ("steady", "flood", "other", "operator")}
LINES = {name: HashedKey.of(key).spell() for name, key in KEYS.items()}


def write_file(path: Path, **fields: str) -> None:
    """The tenants file, with fields of a tenant as YAML."""
    text = "tenants:\n"
    for name, line in LINES.items():
        role = "admin" if name == "operator" else "user"
        text += f"- {{name: {name}, role: {role}, keys: ['{line}'], {fields.get(name, '')}}}\n"
    path.write_text(text, encoding="utf-8")


def prompt_of(tenant: str, token: int, num_blocks: int) -> HashedPrompt:
    tokens = tuple(token * 10_000 + i for i in range(num_blocks * 4))
    return hash_for(make_namespace(), tokens, trust_group=f"tenant:{tenant}")


@dataclass
class Gateways:
    """Gateways over one Valkey and one tenants file."""

    redis_url: str
    path: Path
    channels: Channels

    @asynccontextmanager
    async def running(self, *, with_tenants: bool = True) -> AsyncIterator[str]:
        """One gateway; its address."""
        async with AsyncExitStack() as stack:
            membership = patient_membership(self.redis_url, clock=CLOCK)
            stack.push_async_callback(membership.close)
            index = MemoryIndex(membership)
            service = GatewayService(
                Backend(index, membership, TinyCalls({}, index)),
                GatewaySettings(),
                clock=CLOCK,
                keys=TenantsFile(self.path) if with_tenants else NO_KEYS,
            )
            service.run_beside(BudgetCarrier(Fleet(service, channel_to=self.channels.to)).step)
            await membership.announce(make_worker_record("d0"), ttl_ms=600_000)
            await service.start()
            stack.push_async_callback(service.stop)
            server, port = await serve_grpc(service, address="127.0.0.1:0", channel_to=self.channels.to)
            stack.push_async_callback(server.stop, 0)
            yield f"127.0.0.1:{port}"

    @asynccontextmanager
    async def client(self, address: str, tenant: str = "operator") -> AsyncIterator[AsyncHeadraceClient]:
        client = AsyncHeadraceClient(address, api_key=KEYS[tenant])
        try:
            yield client
        finally:
            await client.close()

    async def table(self, record: StoreNodeRecord) -> dict[str, Budget]:
        """A node's table by account, as it has it now."""
        stub: Any = admin_pb2_grpc.NodeAdminStub(self.channels.to(record.address))
        reply = await stub.GetBudgets(admin_pb2.GetBudgetsRequest(), timeout=30)
        return {row.account: parse_budget(row) for row in reply.budgets}

    async def usage(self, record: StoreNodeRecord, tenant: str) -> admin_pb2.AccountUsage:
        stub: Any = admin_pb2_grpc.NodeAdminStub(self.channels.to(record.address))
        reply = await stub.Usage(admin_pb2.UsageRequest(), timeout=30)
        assert (await stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=30)).broken == ""
        return next(usage for usage in reply.accounts if usage.account == f"tenant:{tenant}")


@pytest.fixture
async def gateways(tmp_path: Path, empty_valkey_url: str, nodes) -> Gateways:
    write_file(tmp_path / "tenants.yaml", steady="protected_mb: 1")
    return Gateways(empty_valkey_url, tmp_path / "tenants.yaml", nodes.channels)


async def until(holds: Callable[[], Awaitable[bool]], *, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110 (other processes have no event for us)
            await asyncio.sleep(0.05)


def bounds_are(gateways: Gateways, record, tenant: str, bytes_max: int | None, bytes_min: int = 0):
    async def holds() -> bool:
        row = (await gateways.table(record)).get(f"tenant:{tenant}")
        return row is not None and (row.bytes_max, row.bytes_min) == (bytes_max, bytes_min)

    return holds


async def test_a_quota_set_at_a_gateway_is_on_every_node_and_outlives_a_killed_one(nodes, gateways) -> None:
    """Fails when a node that was killed, or one that comes later, lets the tenant have more than was said."""
    first, second = await nodes.start("n1"), await nodes.start("n2")
    async with gateways.running() as address, gateways.client(address) as operator:
        for node in (first, second):
            await until(bounds_are(gateways, node.record, "steady", None, MIB))
        change = await operator.set_quota("flood", bytes_max=2 * MIB)
        assert not change.errors
        for node in (first, second):
            assert (await gateways.table(node.record))["tenant:flood"].set_by == "operator"
    # No gateway is left that could carry it there again.
    await first.kill()
    first = await nodes.start("n1")
    row = (await gateways.table(first.record))["tenant:flood"]
    assert (row.bytes_max, row.set_by) == (2 * MIB, "operator")
    assert row.namespaces == (make_namespace().narrowed("", trust_group="tenant:flood").id,)
    async with gateways.running():
        third = await nodes.start("n3")
        await until(bounds_are(gateways, third.record, "flood", 2 * MIB))
        await until(bounds_are(gateways, third.record, "steady", None, MIB))
        assert (await gateways.table(third.record))["tenant:flood"] == row


async def test_a_flood_beyond_a_quota_is_refused_and_takes_nothing_from_a_protected_minimum(nodes, gateways) -> None:
    node = await nodes.start("n1")
    store = nodes.grpc(node.record)
    async with gateways.running() as address, gateways.client(address) as operator:
        await until(bounds_are(gateways, node.record, "steady", None, MIB))
        await operator.set_quota("flood", bytes_max=MIB)
        steady = prompt_of("steady", 1, 200)
        assert await publish(store, steady, range(200)) == 200
        # With a quota: what is too much of one chain is refused, and many chains replace each other.
        long = prompt_of("flood", 2, BLOCKS_PER_MIB + 44)
        stored = [await publish(store, long, range(start, min(start + 100, 300))) for start in range(0, 300, 100)]
        assert sum(stored) == BLOCKS_PER_MIB
        for token in range(3, 9):
            await publish(store, prompt_of("flood", token, 100), range(100))
        usage = await gateways.usage(node.record, "flood")
        assert usage.host_bytes <= MIB
        assert usage.refused_blocks >= 44
        assert usage.evicted_blocks >= 300
        # Without one: the arena turns over, and what is protected stays.
        for token in range(9, 21):
            await publish(store, prompt_of("other", token, 100), range(100))
        assert len(await read(store, steady)) == 200
        assert (await gateways.usage(node.record, "steady")).host_blocks == 200
        assert (await gateways.usage(node.record, "other")).host_blocks < 1_200


async def test_a_changed_tenants_file_counts_where_no_operator_has_spoken(nodes, gateways, caplog) -> None:
    node = await nodes.start("n1")
    async with gateways.running() as address, gateways.client(address) as operator:
        await until(bounds_are(gateways, node.record, "steady", None, MIB))
        await operator.set_quota("other", bytes_max=3 * MIB)
        write_file(gateways.path, steady="quota_mb: 2", other="quota_mb: 1")
        await until(bounds_are(gateways, node.record, "steady", 2 * MIB))
        assert (await gateways.table(node.record))["tenant:other"].bytes_max == 3 * MIB
        with caplog.at_level(logging.INFO, logger="headrace.audit"):
            change = await operator.reset_quota("other")
        assert (change.tenant.bytes_max, change.tenant.budget_from) == (MIB, TENANTS_FILE)
        line = json.loads(caplog.records[-1].message)
        assert (line["who"], line["what"], line["effect"]) == ("operator", "set quota", {"node:n1": "set"})
        write_file(gateways.path, other="quota_mb: 3, protected_mb: 1")
        await until(bounds_are(gateways, node.record, "other", 3 * MIB, MIB))
        await until(bounds_are(gateways, node.record, "steady", None))


async def test_a_user_sees_its_own_row_only_and_sets_nothing(nodes, gateways) -> None:
    node = await nodes.start("n1")
    async with gateways.running() as address, gateways.client(address) as operator:
        await until(bounds_are(gateways, node.record, "steady", None, MIB))
        await publish(nodes.grpc(node.record), prompt_of("flood", 1, 5), range(5))
        async with gateways.client(address, "flood") as user:
            listing = await user.list_tenants()
            assert [tenant.name for tenant in listing.tenants] == ["flood"]
            assert [on_node.host_blocks for on_node in listing.tenants[0].nodes] == [5]
            with pytest.raises(PermissionDenied):
                await user.set_quota("flood", bytes_max=None)
            with pytest.raises(PermissionDenied):
                await user.reset_quota("nobody")
        everyone = await operator.list_tenants()
        assert [(tenant.name, tenant.budget_from) for tenant in everyone.tenants] == [
            ("steady", TENANTS_FILE),
            ("flood", ""),
            ("other", ""),
            ("operator", ""),
        ]


async def test_a_minimum_that_no_node_can_protect_is_refused_and_changes_nothing(nodes, gateways) -> None:
    small, large = await nodes.start("small", arena_mb=2), await nodes.start("large", arena_mb=8)
    async with gateways.running() as address, gateways.client(address) as operator:
        for node in (small, large):
            await until(bounds_are(gateways, node.record, "steady", None, MIB))
        with pytest.raises(InvalidRequest, match=r"nothing was set: node:.*can be protected"):
            await operator.set_quota("other", bytes_max=None, bytes_min=20 * MIB)
        with pytest.raises(InvalidRequest, match="no tenant 'nobody'"):
            await operator.set_quota("nobody", bytes_max=1)
        with pytest.raises(InvalidRequest, match="cannot be larger than the quota"):
            await operator.set_quota("other", bytes_max=1, bytes_min=2)
        change = await operator.set_quota("other", bytes_max=None, bytes_min=2 * MIB)
        assert [holder for holder, _ in change.errors] == ["node:small"]
        # What one node refuses does not keep other rows from it.
        await operator.set_quota("flood", bytes_max=MIB)
        write_file(gateways.path, steady="protected_mb: 1", operator="quota_mb: 1")
        await until(bounds_are(gateways, small.record, "operator", MIB))
        assert (await gateways.table(small.record))["tenant:other"].bytes_min == 0
        assert (await gateways.table(large.record))["tenant:other"].bytes_min == 2 * MIB


async def test_without_tenants_the_one_account_can_have_a_quota(nodes, gateways) -> None:
    node = await nodes.start("n1")
    async with gateways.running(with_tenants=False) as address, gateways.client(address) as anybody:

        async def has_node() -> bool:
            listing = await anybody.list_tenants()
            return [tenant.name for tenant in listing.tenants] == ["default"] and len(listing.tenants[0].nodes) == 1

        await until(has_node)
        await anybody.set_quota("default", bytes_max=MIB)
        prompt = hash_for(make_namespace(), tuple(range(1_200)))
        for start in range(0, 300, 100):
            await publish(nodes.grpc(node.record), prompt, range(start, start + 100))
        (tenant,) = (await anybody.list_tenants()).tenants
        assert (tenant.bytes_max, tenant.budget_from) == (MIB, "operator")
        assert tenant.nodes[0].host_bytes == MIB


async def test_a_table_goes_with_its_arena_and_a_broken_one_does_not_stop_the_start(nodes, gateways) -> None:
    node = await nodes.start("n1")
    stub: Any = admin_pb2_grpc.NodeAdminStub(gateways.channels.to(node.record.address))
    row = admin_pb2.Budget(account="tenant:flood", bytes_max=MIB, set_unix_ms=1, set_by="operator")
    await stub.SetBudgets(admin_pb2.Budgets(budgets=[row]))
    path = budgets_path(arena_path(nodes.arena_dir, "n1"))
    await node.kill()
    path.write_text(path.read_text()[:-3])
    node = await nodes.start("n1")
    assert await gateways.table(node.record) == {}
    await node.kill()
    path.write_text("{}")
    assert remove_arena(nodes.arena_dir, "n1")
    assert not path.exists()
