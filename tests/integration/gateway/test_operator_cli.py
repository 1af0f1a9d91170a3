"""What an operator types, over a real gateway and real store nodes: pins, times to live, drains, quotas."""

import asyncio
import json

import pytest
from admin_kit import admin_over, keep_on_device, prompt_of, store_text
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.client import AsyncHeadraceClient, ControlOutcome, Selector
from headrace.core.tenants import HashedKey, KeyRing, Tenant, TenantRole, new_key

TEXT = "sharedheadtail"  # three blocks, as "sharedhead" has two
LONG = "0123456789" * 5  # twelve blocks of the sixteen that a node has room for
TENANTS = (Tenant("acme", "tenant:acme"), Tenant("ops", "tenant:ops", TenantRole.ADMIN))
KEYS = {tenant.name: new_key() for tenant in TENANTS}
RING = KeyRing(tuple((HashedKey.of(KEYS[tenant.name]), tenant) for tenant in TENANTS))


async def run(admin, *words, who=""):
    """Run the command line in a thread of its own, as it is in a process of its own."""
    given = [*words, "--address", admin.address]
    env = {"HEADRACE_API_KEY": KEYS[who]} if who else {}
    return await asyncio.to_thread(CliRunner().invoke, main, given, catch_exceptions=False, env=env)


async def test_a_pinned_prefix_outlives_an_eviction_of_everything_until_it_is_unpinned(model_path):
    """Fails when a pin does not reach the node, keeps too much or too little, or is not shown."""
    async with admin_over(model_path, "n1", "n2") as admin:
        store_text(admin.kits["n1"], TEXT)
        done = await run(admin, "cache", "pin", "--prefix", "sharedhead", "--for", "1h", "--json")
        outcomes = {report["holder"]: report["outcome"] for report in json.loads(done.stdout)["reports"]}
        assert (done.exit_code, outcomes) == (0, {"node:n1": "done", "node:n2": "not held"})
        shown = json.loads((await run(admin, "cache", "ls", "--json")).stdout)["prefixes"]
        assert [(run["num_blocks"], len(run["pins"])) for run in shown] == [(2, 1), (1, 0)]
        done = await run(admin, "cache", "evict", "--all", "--yes", "--json")
        assert json.loads(done.stdout)["total"]["skipped_pinned_blocks"] == 2
        assert admin.kits["n1"].held(prompt_of(TEXT)) == 2
        assert (await run(admin, "cache", "unpin", "--prefix", "sharedhead")).exit_code == 0
        await run(admin, "cache", "evict", "--all", "--yes")
        assert admin.kits["n1"].held(prompt_of(TEXT)) == 0


async def test_a_pin_over_the_budget_is_refused_with_the_arithmetic_and_exit_code_9(model_path):
    """Fails when a refusal looks like success, or something was dropped for it."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], LONG)
        done = await run(admin, "cache", "pin", "--prefix", LONG)
        assert done.exit_code == 9
        assert "pins may take" in done.stderr
        assert admin.kits["n1"].held(prompt_of(LONG)) == 12
        nodes = json.loads((await run(admin, "nodes", "ls", "--json")).stdout)["nodes"]
        (host,) = nodes[0]["tiers"]
        assert (host["pinned_bytes"], host["pin_bytes_max"] > 0) == (0, True)


async def test_a_node_that_is_dead_is_named_by_every_order(model_path):
    """Fails when a pin on one of two nodes passes for a pin."""
    async with admin_over(model_path, "n1", dead_nodes=("n2",)) as admin:
        store_text(admin.kits["n1"], TEXT)
        for order in (["pin"], ["ttl", "--in", "10m"], ["ttl", "--clear"], ["unpin"]):
            done = await run(admin, "cache", *order, "--prefix", TEXT)
            assert (done.exit_code, "incomplete: node:n2: " in done.stderr) == (9, True), order
        assert (await run(admin, "nodes", "ls")).exit_code == 9


async def test_a_prefix_is_ordered_to_go_and_the_order_taken_back(model_path):
    """Fails when the moment is not the one that was asked for, or a worker's pool is left out."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        keep_on_device(admin.gateway.worker("d0"), TEXT)
        done = await run(admin, "cache", "ttl", "--prefix", "sharedhead", "--in", "10m", "--json")
        reports = {report["holder"]: report for report in json.loads(done.stdout)["reports"]}
        assert (done.exit_code, reports["node:n1"]["blocks"], reports["worker:d0"]["blocks"]) == (0, 2, 2)
        blocks = json.loads((await run(admin, "cache", "ls", "--blocks", "--node", "n1", "--json")).stdout)["blocks"]
        assert [block["expires_unix_ms"] > 0 for block in blocks] == [False, True, True]
        assert (await run(admin, "cache", "ttl", "--prefix", "sharedhead", "--clear")).exit_code == 0
        blocks = json.loads((await run(admin, "cache", "ls", "--blocks", "--node", "n1", "--json")).stdout)["blocks"]
        assert not any(block["expires_unix_ms"] for block in blocks)


async def test_a_drained_nodes_blocks_are_at_its_peer_and_it_serves_again_when_told(model_path):
    """Fails when the last line is not what was done, or the state does not show in the list of nodes."""
    async with admin_over(model_path, "n1", "n2") as admin:
        store_text(admin.kits["n1"], TEXT)
        done = await run(admin, "nodes", "drain", "n1")
        assert done.exit_code == 0
        assert done.stdout.startswith("node:n1 is drained: 3 of 3 blocks moved")
        assert "to node:n2 3, 0 a peer had already, 0 stay here alone" in done.stdout
        assert admin.kits["n2"].held(prompt_of(TEXT)) == 3
        nodes = json.loads((await run(admin, "nodes", "ls", "--json")).stdout)["nodes"]
        assert {node["node_id"]: node["draining"] for node in nodes} == {"n1": True, "n2": False}
        done = await run(admin, "nodes", "drain", "n1", "--undo")
        assert (done.exit_code, done.stdout) == (0, "node:n1 is serving\n")
        assert (await run(admin, "nodes", "drain", "nobody")).exit_code == 3


async def test_a_drain_without_anywhere_to_go_says_so_and_changes_nothing(model_path):
    async with admin_over(model_path, "n1") as admin:
        done = await run(admin, "nodes", "drain", "n1")
        assert done.exit_code == 3
        assert "nowhere to move" in done.stderr


async def test_an_operator_sets_a_quota_and_a_tenant_sees_its_own_only(model_path):
    """Fails when a quota does not reach the node, or a tenant sees or sets another's."""
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        store_text(admin.kits["n1"], TEXT, group="tenant:acme")
        done = await run(admin, "tenants", "quota", "acme", "--max", "4096", "--min", "1024", "--json", who="ops")
        tenant = json.loads(done.stdout)["tenant"]
        assert (tenant["bytes_max"], tenant["bytes_min"], tenant["budget_from"]) == (4096, 1024, "operator")
        (budget,) = [row for row in admin.kits["n1"].node.room.budgets() if row.account == "tenant:acme"]
        assert (budget.bytes_max, budget.bytes_min) == (4096, 1024)
        for words in (["--max", "1"], ["--min", "8192"]):
            assert (await run(admin, "tenants", "quota", "acme", *words, who="ops")).exit_code == 3
        done = await run(admin, "tenants", "ls", "--json", who="acme")
        assert [tenant["name"] for tenant in json.loads(done.stdout)["tenants"]] == ["acme"]
        assert (await run(admin, "tenants", "quota", "acme", "--none", who="acme")).exit_code == 10
        done = await run(admin, "tenants", "quota", "acme", "--reset", "--json", who="ops")
        assert json.loads(done.stdout)["tenant"]["bytes_max"] is None


@pytest.mark.parametrize("who", ["acme", "ops"])
async def test_top_shows_a_caller_what_it_may_see(model_path, who):
    """Fails when live figures tell a tenant of others' blocks."""
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        store_text(admin.kits["n1"], TEXT, group="tenant:acme")
        store_text(admin.kits["n1"], LONG, group="tenant:ops")
        done = await run(admin, "cache", "top", "--once", "--every", "0.2s", "--json", who=who)
        assert done.exit_code == 0
        node = next(row for row in json.loads(done.stdout)["holders"] if row["holder"] == "node:n1")
        assert node["committed_blocks"] == (3 if who == "acme" else 15)


async def test_the_async_client_orders_sets_and_drains_as_the_other_does(model_path):
    """Fails when one of the two clients lacks a call or reads an answer differently."""
    async with (
        admin_over(model_path, "n1", "n2") as admin,
        AsyncHeadraceClient(admin.address) as client,
    ):
        store_text(admin.kits["n1"], TEXT)
        prefix = Selector(prefix_text=TEXT)
        pinned = {report.holder: report for report in await client.pin(prefix, for_s=60)}
        assert (pinned["node:n1"].outcome, pinned["node:n1"].blocks) == (ControlOutcome.DONE, 3)
        assert {report.outcome for report in await client.set_ttl(prefix, ttl_s=60)} >= {ControlOutcome.DONE}
        assert {report.outcome for report in await client.unpin(prefix)} >= {ControlOutcome.DONE}
        assert [tenant.name for tenant in (await client.list_tenants()).tenants] == ["default"]
        assert (await client.set_quota("default", bytes_max=4096)).tenant.bytes_max == 4096
        assert (await client.reset_quota("default")).tenant.bytes_max is None
        steps = [step async for step in client.drain_node("node:n1")]
        assert (steps[-1].state, steps[-1].moved_to) == ("drained", {"n2": 3})
