"""`headrace status` and `headrace top` over several hosts: real store nodes, of which some are silent or gone."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

from admin_kit import Admin, admin_over, store_text
from click.testing import CliRunner
from tiny_gateway import NODE

from headrace.admin.cli import main
from headrace.core.errors import IndexUnavailable
from headrace.core.members import GatewayRecord

TEXT = "sharedheadtail!!"


async def run(admin: Admin, *words: str):
    """Run the command line in a thread of its own, as it is in a process of its own."""
    return await asyncio.to_thread(CliRunner().invoke, main, [*words, "--address", admin.address])


@asynccontextmanager
async def two_hosts(model_path, *, dead_nodes=()):
    """Node n1 and worker d0 on host h1, n2 and d1 on h2, with a gateway each; dead nodes are on h3."""
    async with admin_over(model_path, "n1", "n2", dead_nodes=dead_nodes) as admin:
        members = admin.gateway.membership
        hosts = {"n1": "h1", "n2": "h2", **dict.fromkeys(dead_nodes, "h3")}
        for node in await members.store_nodes():
            await members.announce(replace(node, host=hosts[node.node_id]), ttl_ms=60_000)
        for worker, host in zip(await members.workers(), ("h1", "h2"), strict=True):
            await members.announce(replace(worker, host=host, running=1), ttl_ms=60_000)
            await members.announce(GatewayRecord(f"g-{host}", 1, host, "127.0.0.1:9", 1), ttl_ms=60_000)
        yield admin


async def test_status_shows_each_host_with_what_runs_there(model_path):
    """Fails when several nodes or gateways are one row, or numbers of one host show at another."""
    async with two_hosts(model_path) as admin:
        store_text(admin.kits["n2"], TEXT)
        done = await run(admin, "status", "--json")
        found = json.loads(done.stdout)
        assert done.exit_code == 0
        hosts = {host["host"]: host for host in found["hosts"]}
        assert sorted(hosts) == ["h1", "h2"]
        parts = ("store_nodes", "workers", "gateways", "running", "state")
        for host in hosts.values():
            assert [host[name] for name in parts] == [1, 1, 1, 1, "ok"]
        assert hosts["h1"]["used_arena_bytes"] == 0 < hosts["h2"]["used_arena_bytes"] < hosts["h2"]["arena_bytes"]
        shown = (await run(admin, "status")).stdout
        assert all(name in shown for name in ("h1", "h2", "n1", "n2", "g-h1", "g-h2", "d0", "d1"))


async def test_status_names_who_is_announced_and_does_not_answer_and_exits_9(model_path):
    """Fails when a dead node passes for a live one until its record runs out."""
    async with two_hosts(model_path, dead_nodes=("n9",)) as admin:
        done = await run(admin, "status", "--json")
        found = json.loads(done.stdout)
        states = {host["host"]: host["state"] for host in found["hosts"]}
        assert (done.exit_code, states) == (9, {"h1": "ok", "h2": "ok", "h3": "silent"})
        assert list(found["errors"]) == ["node:n9"]
        shown = await run(admin, "status")
        assert shown.exit_code == 9
        assert "incomplete: node:n9: " in shown.stderr
        (row,) = [line.split() for line in shown.stdout.splitlines() if line.startswith("n9")]
        assert row[1] == "silent"


async def test_status_tells_for_a_while_of_who_was_there_and_since_when_not(model_path):
    """Fails when a host that died is simply not listed, or one that came back is still called gone."""
    async with two_hosts(model_path) as admin:
        members = admin.gateway.membership
        await run(admin, "status")
        for leaving in [*await members.store_nodes(), *await members.workers(), *await members.gateways()]:
            if leaving.host == "h2":
                await members.withdraw(leaving)
        done = await run(admin, "status", "--json")
        found = json.loads(done.stdout)
        gone = {each["member"]: each for each in found["gone"] if each["host"] == "h2"}
        assert sorted(gone) == ["gateway:g-h2", "node:n2", "worker:d1"]
        now_unix_ms = admin.gateway.service.clock.unix_ms()
        assert all(0 <= now_unix_ms - each["last_seen_unix_ms"] < 600_000 for each in gone.values())
        assert {host["host"]: host["state"] for host in found["hosts"]}["h2"] == "gone"
        assert done.exit_code == 0, "a part that left is no fault of the command"
        assert "node:n2" in (await run(admin, "status")).stdout
        await members.announce(replace(NODE, node_id="n2", host="h2"), ttl_ms=60_000)
        found = json.loads((await run(admin, "status", "--json")).stdout)
        assert "node:n2" not in {each["member"] for each in found["gone"]}


async def test_top_shows_hosts_with_rates_and_once_exits_9_for_a_silent_one(model_path):
    """Fails when rates of several hosts are added up, or a silent host ends the whole look."""
    async with two_hosts(model_path, dead_nodes=("n9",)) as admin:
        done = await run(admin, "top", "--once", "--every", "0.2s", "--json")
        found = json.loads(done.stdout)
        hosts = {host["host"]: host for host in found["hosts"]}
        assert done.exit_code == 9
        assert {host: row["state"] for host, row in hosts.items()} == {"h1": "ok", "h2": "ok", "h3": "silent"}
        assert hosts["h1"]["lookups_per_s"] is not None
        assert hosts["h3"]["lookups_per_s"] is None
        shown = (await run(admin, "top", "--once", "--every", "0.2s")).stdout
        assert "look-ups" in shown
        assert "silent" in shown


async def test_status_and_top_answer_while_the_index_is_away(model_path):
    """Fails when the one command that says what is wrong fails with it."""
    async with two_hosts(model_path) as admin:
        await run(admin, "status")
        membership, members = admin.gateway.service.membership, admin.gateway.service.membership._membership
        membership._membership = Away()
        try:
            done = await run(admin, "status")
            assert (done.exit_code, "index: NOT available" in done.stdout) == (0, True)
            assert "d0" in done.stdout
            found = json.loads((await run(admin, "top", "--once", "--every", "0.2s", "--json")).stdout)
            assert {host["host"]: host["workers"] for host in found["hosts"]} == {"h1": 1, "h2": 1}
        finally:
            membership._membership = members


class Away:
    """A Membership that does not answer."""

    async def store_nodes(self):
        raise IndexUnavailable("away")

    workers = gateways = store_nodes

    async def withdraw(self, record): ...

    async def announce(self, record, *, ttl_ms):
        raise IndexUnavailable("away")
