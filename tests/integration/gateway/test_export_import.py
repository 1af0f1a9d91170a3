"""Export and import over real store nodes: what comes back is what was there, and nothing unchecked is stored."""

import asyncio
import json

import pytest
from admin_kit import admin_over, store_text, token_ids_of
from click.testing import CliRunner
from tiny_gateway import make_namespace

from headrace.admin.cli import main
from headrace.admin.export_file import check_export, read_export
from headrace.admin.portable_blocks import Written, chains_of, write_blocks
from headrace.client import HeadraceClient, Selector
from headrace.gateway.prepare_request import hash_for

TEXT = "sharedheadtail!!"


async def run(admin, *args):
    """Run the command line in a thread of its own, as it is in a process of its own."""
    command = ["cache", *args, "--address", admin.address]
    return await asyncio.to_thread(CliRunner().invoke, main, command, catch_exceptions=False)


async def test_an_exported_prefix_is_imported_into_another_system_whole(model_path, tmp_path):
    """Fails when blocks before the prefix's last one are left out, a payload changes, or a salt's blocks are lost."""
    file = str(tmp_path / "prefix.hrx")
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        store_text(admin.kits["n1"], TEXT, salt="mine")
        done = await run(admin, "export", file, "--prefix", TEXT[:12], "--json")
        assert (done.exit_code, json.loads(done.stdout)["blocks"]) == (0, 8)
    async with admin_over(model_path, "n1") as admin:
        done = await run(admin, "import", file, "--json")
        assert (done.exit_code, json.loads(done.stdout)["blocks"]) == (0, {"stored": 8})
        for salt in ("", "mine"):
            assert admin.kits["n1"].held(hash_for(make_namespace(), token_ids_of(TEXT), cache_salt=salt)) == 4
        admin.kits["n1"].node.check_integrity()
        again = await run(admin, "import", file, "--json")
        assert json.loads(again.stdout)["blocks"] == {"already stored": 8}
        (listed,) = [
            b for b in (await admin.list_blocks()).blocks if b.position == 0 and b.namespace == make_namespace().id
        ]
        assert listed.producer == "worker-1"


async def test_a_file_of_another_namespace_is_refused_by_the_field_that_differs(model_path, tmp_path):
    """Fails when foreign blocks are stored, or the refusal does not say why."""
    file = str(tmp_path / "prefix.hrx")
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        await run(admin, "export", file, "--prefix", TEXT[:12])
    other = make_namespace(weights_digest="newer")
    async with admin_over(model_path, "n1", namespace=other) as admin:
        done = await run(admin, "import", file)
        assert done.exit_code == 3
        assert "fields that differ: weights_digest" in done.stderr
        assert admin.kits["n1"].node.stat().committed_blocks == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
async def test_a_damaged_file_is_refused_before_anything_is_sent(model_path, tmp_path, damage):
    """Fails when a bit flip or a cut off end gets as far as a node."""
    file = tmp_path / "prefix.hrx"
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        await run(admin, "export", str(file), "--prefix", TEXT[:12])
        await admin.evict()
        data = bytearray(file.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
        file.write_bytes(data[:-9] if damage == "cut" else b"something else" if damage == "other" else data)
        done = await run(admin, "import", str(file))
        assert done.exit_code == 3
        assert "is refused" in done.stderr
        assert admin.kits["n1"].node.stat().committed_blocks == 0


async def test_exporting_nothing_writes_no_file(model_path, tmp_path):
    """Fails when an empty export looks like one that worked."""
    async with admin_over(model_path, "n1") as admin:
        done = await run(admin, "export", str(tmp_path / "none.hrx"), "--prefix", TEXT)
        assert done.exit_code == 3
        assert list(tmp_path.iterdir()) == []


async def test_what_leaves_while_it_is_exported_is_left_out_and_counted(model_path, tmp_path):
    """Fails when one block that an eviction took ends an export, or a file has a block without the one before it."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)

        def export_late() -> tuple[Written, list[bytes]]:
            with HeadraceClient(admin.address) as client, (tmp_path / "f.hrx").open("wb") as out:
                blocks = [block for block in client.list_blocks().blocks if block.holder == "node:n1"]
                client.evict(Selector(block_hashes=(blocks[2].block_hash,)), dry_run=False)
                written = write_blocks(client, chains_of(blocks, blocks), out)
            head = check_export(tmp_path / "f.hrx")
            return written, [block.header for block in read_export(tmp_path / "f.hrx", head)]

        written, headers = await asyncio.to_thread(export_late)
        assert (written.blocks, written.gone_blocks, len(headers)) == (2, 2, 2)
