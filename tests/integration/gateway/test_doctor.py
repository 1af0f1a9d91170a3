"""`doctor` over real store nodes: what is wrong is said and what can be repaired is."""

import asyncio
import json
import time
from dataclasses import replace

from admin_kit import admin_over, store_text, token_ids_of
from click.testing import CliRunner
from store_kit import HandClock
from tiny_gateway import make_namespace

from headrace.admin.cli import main
from headrace.core.block import HolderId, Tier
from headrace.core.budgets import Budget
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import RequestId
from headrace.gateway.prepare_request import hash_for
from headrace.gateway.recent_prompts import RecentPrompt
from headrace.wire.v1 import admin_pb2

TEXT = "sharedheadtail!!"


class WorldClock(HandClock):
    """A hand's clock that somebody has set going: the doctor compares it with others."""

    seconds = property(lambda self: time.time(), lambda self, value: None)


async def examine(admin, *args):
    """Run the command in a thread of its own; its exit code and what was not well."""
    for kit in admin.kits.values():
        kit.clock.__class__ = WorldClock  # from now on
    command = ["doctor", "--json", "--address", admin.address, *args]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, catch_exceptions=False)
    return done.exit_code, [found for found in json.loads(done.stdout)["findings"] if not found["ok"]]


async def test_a_healthy_system_has_no_problems(model_path):
    """Fails when a check cries wolf."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        await admin.gateway.service.index.register(
            holder=HolderId("node:n1"),
            incarnation=1,
            tier=Tier.HOST,
            namespace=make_namespace().id,
            blocks=hash_for(make_namespace(), token_ids_of(TEXT)).chain,
        )
        assert await examine(admin) == (0, [])


async def test_what_is_wrong_is_named_with_its_holder(model_path):
    """Fails when a silent holder, an index that is behind or two namespaces that ought to be one go unsaid."""
    async with admin_over(model_path, "n1", dead_nodes=["n9"]) as admin:
        store_text(admin.kits["n1"], TEXT)
        admin.gateway.worker("d0").fails = WorkerUnavailable("d0", "died")
        other = replace(
            admin.gateway.worker("d1").record,
            namespace=make_namespace(weights_digest="newer"),
            incarnation=2,
            model_path=model_path,
        )
        await admin.gateway.membership.announce(other, ttl_ms=60_000)
        code, problems = await examine(admin)
        assert code == 1
        assert {(found["check"], found["holder"]) for found in problems} == {
            ("store node", "node:n9"),
            ("index entries", "node:n1"),
            ("worker", "worker:d0"),
            ("namespace", "worker:d0"),
        }
        (apart,) = [found for found in problems if found["check"] == "namespace"]
        assert "weights_digest differ" in apart["detail"]


async def test_fix_has_a_misrepresented_node_register_again(model_path):
    """Fails when the repair is claimed and not done."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        before = admin.kits["n1"].node.incarnation
        code, problems = await examine(admin, "--fix")
        assert (code, [found["fixed"] for found in problems]) == (0, ["registers its 4 blocks again"])
        assert admin.kits["n1"].node.incarnation > before


async def register(admin, holder, text=TEXT):
    """Have the index name a text's blocks, true or not."""
    await admin.gateway.service.index.register(
        holder=HolderId(holder),
        incarnation=1,
        tier=Tier.HOST,
        namespace=make_namespace().id,
        blocks=hash_for(make_namespace(), token_ids_of(text)).chain,
    )


async def test_entries_for_blocks_that_a_node_does_not_hold_are_found_and_voided(model_path):
    """Fails when only one direction is compared: such entries send readers to a node that has nothing for them."""
    async with admin_over(model_path, "n1", "n2") as admin:
        store_text(admin.kits["n2"], TEXT)
        await register(admin, "node:n1")
        await register(admin, "node:n2")
        code, problems = await examine(admin)
        assert code == 1
        (found,) = problems
        assert (found["check"], found["holder"]) == ("index entries", "node:n1")
        assert "the index names 4 blocks that it does not hold" in found["detail"]
        before = admin.kits["n1"].node.incarnation
        await examine(admin, "--fix")
        assert admin.kits["n1"].node.incarnation > before


async def test_entries_that_only_a_served_request_knows_of_are_found(model_path):
    """Fails when blocks that no node holds any more are looked for in listings alone."""
    async with admin_over(model_path, "n1") as admin:
        await register(admin, "node:n1")
        prompt = hash_for(make_namespace(), token_ids_of(TEXT))
        admin.gateway.service.recent_prompts.add(RequestId("r1"), RecentPrompt("tiny", "", prompt))
        _, (found,) = await examine(admin)
        assert "the index names 4 blocks that it does not hold" in found["detail"]


async def test_books_that_do_not_balance_are_told_of(model_path):
    """Fails when a node's own check is not asked for, or its answer is lost."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        await register(admin, "node:n1")
        next(iter(admin.kits["n1"].node.residents())).leases += 1
        _, (found,) = await examine(admin)
        assert (found["check"], found["holder"]) == ("books", "node:n1")
        assert "lease counts do not match leases" in found["detail"]


async def test_draining_is_well_as_long_as_another_node_takes_new_blocks(model_path):
    """Fails when a forgotten drain of the last node goes unsaid, or a drain as it should be is called a problem."""
    async with admin_over(model_path, "n1", "n2") as admin:
        for holder, problems in (("node:n1", []), ("node:n2", ["node:n1", "node:n2"])):
            order = admin_pb2.DrainNodeRequest(holder=holder, without_moving=True)
            assert [step.state async for step in admin.stub.DrainNode(order)] == ["draining"]
            _, found = await examine(admin)
            assert [each["holder"] for each in found if each["check"] == "draining"] == problems


async def test_a_worker_of_another_version_or_time_is_named(model_path):
    """Fails when the records' version or clock is not looked at."""
    async with admin_over(model_path, "n1") as admin:
        now_ms = int(time.time() * 1_000)
        for worker_id, changes in {"d0": {"version": "0.0.1"}, "d1": {"unix_ms": now_ms - 3_600_000}}.items():
            record = replace(admin.gateway.worker(worker_id).record, incarnation=2, model_path=model_path, **changes)
            await admin.gateway.membership.announce(record, ttl_ms=60_000)
        _, problems = await examine(admin)
        assert {(found["check"], found["holder"]) for found in problems} == {
            ("version", "worker:d0"),
            ("clock", "worker:d1"),
        }


async def test_budgets_that_differ_between_nodes_are_found_and_carried(model_path):
    """Fails when a tenant's quota holds on one node only and nobody says so."""
    async with admin_over(model_path, "n1", "n2") as admin:
        budget = Budget(account="acme", bytes_max=1 << 20, set_unix_ms=5, set_by="ops")
        admin.kits["n1"].node.room.set_budgets([budget])
        _, (found,) = await examine(admin)
        assert (found["check"], found["holder"]) == ("budgets", "node:n2")
        assert "'acme'" in found["detail"]
        code, _ = await examine(admin, "--fix")
        assert code == 0
        assert admin.kits["n2"].node.room.budgets() == (budget,)
