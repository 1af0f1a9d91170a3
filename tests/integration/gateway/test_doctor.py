"""`doctor` over real store nodes: what is wrong is said and what can be repaired is."""

import asyncio
import json
from dataclasses import replace

from admin_kit import admin_over, store_text, token_ids_of
from click.testing import CliRunner
from tiny_gateway import make_namespace

from headrace.admin.cli import main
from headrace.core.block import HolderId, Tier
from headrace.core.errors import WorkerUnavailable
from headrace.gateway.service import hash_for

TEXT = "sharedheadtail!!"


async def examine(admin, *args):
    """Run the command in a thread of its own; its exit code and what was not well."""
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
