"""`headrace cache export` and `cache import`: prefixes as a file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.export_file import ExportWriter, check_export, read_export
from headrace.admin.selection import selector_options
from headrace.admin.terminal import EXIT_INCOMPLETE, human_bytes, json_option, print_json, say
from headrace.client import BlockEntry, Selector
from headrace.core.errors import InvalidRequest

REPORT_EVERY_BLOCKS = 100


@click.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@selector_options
@address_option
@json_option
def export_blocks(*, file: Path, selector: Selector, address: str, as_json: bool) -> None:
    """Write what is selected, with every block before it, into FILE.

    The file is portable to any system that serves the same model with the same settings. It holds what the prompts
    said, as token ids and as KV: keep it as you would keep the prompts.

    \b
    Examples:
      headrace cache export system-prompt.hrx --prefix "You are a helpful assistant"
      headrace cache export all.hrx --model qwen
    """
    with connect(address) as client:
        chosen = client.list_blocks(selector)
        everything = client.list_blocks(Selector(model=selector.model))
        chains = _chains(chosen.blocks, everything.blocks)
        if not chains:
            raise InvalidRequest("no store node has a block that this selects; nothing was written", param="selector")
        bases = {(chain[-1].base_namespace, chain[-1].model) for chain in chains}
        if len(bases) > 1:
            raise InvalidRequest(f"this selects blocks of {len(bases)} models; say --model", param="model")
        partial, total = file.with_name(file.name + ".partial"), 0
        with partial.open("wb") as out:
            writer = None
            for number, chain in enumerate(chains, start=1):
                last = chain[-1]
                block = client.read_block(
                    last.holder, namespace=last.namespace, chain=[each.block_hash for each in chain]
                )
                writer = writer or ExportWriter(out, model=last.model, namespace_fields=block.namespace_fields)
                writer.add(block)
                total += len(block.payload)
                if number % REPORT_EVERY_BLOCKS == 0:
                    say(f"[{number:,}/{len(chains):,}] {human_bytes(total)}")
            assert writer is not None
            writer.close()
        partial.replace(file)
    if as_json:
        print_json({"file": str(file), "blocks": len(chains), "bytes": total, "errors": dict(chosen.errors)})
    else:
        click.echo(f"{file}: {len(chains):,} blocks, {human_bytes(total)}")
    for holder, error in chosen.errors:
        say(f"incomplete: {holder}: {error}")
    if chosen.errors or chosen.total_blocks > len(chosen.blocks):
        raise SystemExit(EXIT_INCOMPLETE)


def _chains(chosen: Sequence[BlockEntry], everything: Sequence[BlockEntry]) -> list[list[BlockEntry]]:
    """For each chosen block and each before it, its chain from block 0 on one node that has all of it, heads first."""
    by_holder: dict[str, dict[tuple[str, bytes], BlockEntry]] = {}
    for block in (*everything, *chosen):
        if block.holder.startswith("node:"):
            by_holder.setdefault(block.holder, {})[(block.namespace, block.block_hash)] = block
    chains: dict[tuple[str, bytes], list[BlockEntry]] = {}
    for wanted in chosen:
        for held in by_holder.values():
            chain: list[BlockEntry] = []
            block = held.get((wanted.namespace, wanted.block_hash))
            while block is not None:
                chain.insert(0, block)
                block = held.get((block.namespace, block.parent_hash))
            if chain and chain[0].position == 0:
                for end in range(1, len(chain) + 1):
                    chains.setdefault((wanted.namespace, chain[end - 1].block_hash), chain[:end])
                break
    return sorted(chains.values(), key=len)


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--node", default="", help="Store node to write to. Default: the first live one.")
@address_option
@json_option
def import_blocks(*, file: Path, node: str, address: str, as_json: bool) -> None:
    """Store the blocks of FILE on one store node, from where every worker can read them.

    The file's checksum is compared before anything is sent, and the node checks each block again. A file of another
    model or other settings is refused, and the field that differs is named. Exit code 9: there was no room for all.

    \b
    Examples:
      headrace cache import system-prompt.hrx
      headrace cache import system-prompt.hrx --node host-3
    """
    head = check_export(file)
    outcomes: Counter[str] = Counter()
    with connect(address) as client:
        names = [record.node_id for record in client.status().store_nodes]
        if not node and not names:
            raise InvalidRequest("there is no live store node; nothing was stored", param="node")
        holder = f"node:{(node or names[0]).removeprefix('node:')}"
        for number, block in enumerate(read_export(file, head), start=1):
            outcomes[client.write_block(holder, block)] += 1
            if number % REPORT_EVERY_BLOCKS == 0:
                say(f"[{number:,}/{head.num_blocks:,}]")
    if as_json:
        print_json({"file": str(file), "holder": holder, "model": head.model, "blocks": dict(outcomes)})
    else:
        click.echo(f"{holder}: " + ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items()))
    if outcomes["no room"]:
        raise SystemExit(EXIT_INCOMPLETE)
