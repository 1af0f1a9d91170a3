"""`headrace cache export` and `cache import`: prefixes as a file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.export_file import ExportWriter, check_export, read_export
from headrace.admin.output_file import OutputFile
from headrace.admin.selection import Words, selector_options
from headrace.admin.terminal import (
    EXIT_INCOMPLETE,
    counted,
    exit_if_incomplete,
    human_bytes,
    json_option,
    print_json,
    say,
)
from headrace.client import BlockEntry, HeadraceClient, Selector
from headrace.core.errors import InvalidRequest

REPORT_EVERY_BLOCKS = 100


@click.command("export", short_help="Write prefixes into a file.")
@click.argument("file", type=OutputFile(is_replaced=True))
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
        chains = chains_of(chosen.blocks, everything.blocks)
        if not chains:
            raise InvalidRequest("no store node has a block that this selects; nothing was written", param="selector")
        bases = {(each.chain[0].base_namespace, each.chain[0].model) for each in chains}
        if len(bases) > 1:
            raise InvalidRequest(f"this selects blocks of {len(bases)} models; say --model", param="model")
        partial = file.with_name(file.name + ".partial")
        try:
            with partial.open("wb") as out:
                written = write_blocks(client, chains, out)
            if written.blocks:
                partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    if not written.blocks:
        raise InvalidRequest("what this selects left while it was read; nothing was written", param="selector")
    if as_json:
        counts = {"blocks": written.blocks, "bytes": written.bytes, "gone_blocks": written.gone_blocks}
        print_json({"file": str(file), **counts, "errors": dict(chosen.errors)})
    else:
        click.echo(f"{file}: {counted(written.blocks, 'block')}, {human_bytes(written.bytes)}")
    if written.gone_blocks:
        say(f"incomplete: {counted(written.gone_blocks, 'block')} left the cache while it was read")
    exit_if_incomplete(chosen.errors)
    if written.gone_blocks or chosen.total_blocks > len(chosen.blocks):
        raise SystemExit(EXIT_INCOMPLETE)


@dataclass(frozen=True, slots=True)
class Written:
    """What is in a file now. `gone_blocks` were listed, and not there any more when they were read."""

    blocks: int
    bytes: int
    gone_blocks: int


@dataclass(frozen=True, slots=True)
class Leading:
    """The first blocks of a chain, of which the last is meant. All that end in one chain share it: a prompt of
    thousands of blocks has as many ends."""

    chain: Sequence[BlockEntry]
    num_blocks: int


def write_blocks(client: HeadraceClient, chains: Sequence[Leading], out: BinaryIO) -> Written:
    """Read and write the block that each means, heads first. What stands on a block that is gone is left out too."""
    writer, total, gone = None, 0, set[tuple[str, bytes]]()
    for number, leading in enumerate(chains, start=1):
        chain = leading.chain[: leading.num_blocks]
        last = chain[-1]
        if (last.namespace, last.parent_hash) in gone:
            gone.add((last.namespace, last.block_hash))
            continue
        hashes = [each.block_hash for each in chain]
        try:
            block = client.read_block(last.holder, namespace=last.namespace, chain=hashes)
        except InvalidRequest as refused:
            if refused.param != "chain":
                raise
            gone.add((last.namespace, last.block_hash))
            continue
        writer = writer or ExportWriter(out, model=last.model, namespace_fields=block.namespace_fields)
        writer.add(block)
        total += len(block.payload)
        if number % REPORT_EVERY_BLOCKS == 0:
            say(f"[{number:,}/{len(chains):,}] {human_bytes(total)}")
    if writer is not None:
        writer.close()
    return Written(len(chains) - len(gone), total, len(gone))


def chains_of(chosen: Sequence[BlockEntry], everything: Sequence[BlockEntry]) -> list[Leading]:
    """For each chosen block and each before it, its chain from block 0 on one node that has all of it, heads first."""
    by_holder: dict[str, dict[tuple[str, bytes], BlockEntry]] = {}
    for block in (*everything, *chosen):
        if block.holder.startswith("node:"):
            by_holder.setdefault(block.holder, {})[(block.namespace, block.block_hash)] = block
    found: dict[tuple[str, bytes], Leading] = {}
    # The last blocks first: the chain to a prompt's end is that to each block before it, too.
    for wanted in sorted(chosen, key=lambda block: block.position, reverse=True):
        if (wanted.namespace, wanted.block_hash) in found:
            continue
        chain = next(filter(None, (_chain_to(wanted, held) for held in by_holder.values())), [])
        for num_blocks, block in reversed(list(enumerate(chain, start=1))):
            if (block.namespace, block.block_hash) in found:
                break  # and so is all before it
            found[(block.namespace, block.block_hash)] = Leading(chain, num_blocks)
    return sorted(found.values(), key=lambda leading: leading.num_blocks)


def _chain_to(wanted: BlockEntry, held: Mapping[tuple[str, bytes], BlockEntry]) -> list[BlockEntry]:
    """From block 0 to this one on a node that holds these; empty where it does not have all of it."""
    chain: list[BlockEntry] = []
    found = held.get((wanted.namespace, wanted.block_hash))
    while found is not None:
        chain.append(found)
        found = held.get((found.namespace, found.parent_hash))
    return chain[::-1] if chain and chain[-1].position == 0 else []


@click.command("import", short_help="Store the blocks of a file on a node.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--node", type=Words(), help="Store node to write to. Default: the first live one.")
@address_option
@json_option
def import_blocks(*, file: Path, node: str | None, address: str, as_json: bool) -> None:
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
