"""`headrace cache show` and `cache why-miss`: one block on every holder, and why a prompt was not found."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import click

from headrace.admin.cache_commands import describe_pin
from headrace.admin.connection import address_option, connect
from headrace.admin.prompt_options import model_option, prompt_options, salt_option
from headrace.admin.selection import HASH_LENGTHS, Words
from headrace.admin.terminal import (
    counted,
    exit_if_incomplete,
    human_bytes,
    human_left,
    human_seconds,
    json_option,
    print_json,
    print_table,
    say,
    to_jsonable,
    unix_ms_now,
)
from headrace.client import BlockEntry, MissExplanation, Prompt, Selector
from headrace.core.errors import InvalidRequest

PART_OF_A_HASH = re.compile(r"[0-9a-f]{4,}")


@click.command("show", short_help="Show one block on every holder.")
@click.argument("block", metavar="HASH|PREFIX", type=Words())
@click.option("--text", "with_text", is_flag=True, help="Show what the block says, which is what users sent.")
@model_option
@address_option
@json_option
def show_block(*, block: str, model: str, with_text: bool, address: str, as_json: bool) -> None:
    """Show one block on every holder: tier, size, hits, age, and what its header says.

    HASH is a whole block hash as `cache ls` prints it. Anything else is a prefix's text, which names its last full
    block, in every trust group and under every salt.

    \b
    Examples:
      headrace cache show 5d0c5b1e0f9a4c0d8e7f6a5b4c3d2e1f
      headrace cache show "You are a helpful assistant" --text
    """
    block_hash = _hash(block)
    selector = Selector(model=model, block_hashes=(block_hash,)) if block_hash else Selector(model, prefix_text=block)
    with connect(address) as client:
        try:
            listing = client.list_blocks(selector, with_text=with_text)
        except InvalidRequest as refused:
            if refused.param != "prefix_text" or not PART_OF_A_HASH.fullmatch(block):
                raise
            whole = "a block's hash is whole with 32 or 64 digits, as `cache ls` prints it"
            raise InvalidRequest(f"{refused} ({whole})", param=refused.param) from refused
    copies = _named(listing.blocks, block_hash)
    below = len({found.block_hash for found in listing.blocks}) - len({found.block_hash for found in copies})
    if as_json:
        print_json({"copies": copies, "blocks_behind": below, "errors": dict(listing.errors)})
    elif copies:
        _print_copies(copies, with_text=with_text)
        say(f"blocks that stand on it: {below:,}")
    exit_if_incomplete(listing.errors)
    if not copies:
        say("no holder has it (`headrace cache why-miss` says why)")


def _hash(text: str) -> bytes:
    try:
        parsed = bytes.fromhex(text)
    except ValueError:
        return b""
    return parsed if len(parsed) in HASH_LENGTHS else b""


def _named(blocks: Sequence[BlockEntry], block_hash: bytes) -> list[BlockEntry]:
    """The copies of the named block: of that hash, or where a prefix ends, which is first in each namespace."""
    if block_hash:
        return [block for block in blocks if block.block_hash == block_hash]
    ends: dict[str, int] = {}
    for block in blocks:
        ends[block.namespace] = min(block.position, ends.get(block.namespace, block.position))
    return [block for block in blocks if block.position == ends[block.namespace]]


def _print_copies(copies: Sequence[BlockEntry], *, with_text: bool) -> None:
    now = unix_ms_now()
    rows = [
        [
            block.holder,
            block.tier,
            f"{len(block.token_ids):,}",
            human_bytes(block.bytes),
            f"{block.hits:,}",
            human_seconds(block.age_s),
            human_seconds(block.idle_s),
            f"{block.leases:,}",
            describe_pin(block, now_unix_ms=now) or "-",
            human_left(block.expires_unix_ms, now_unix_ms=now) if block.expires_unix_ms else "-",
        ]
        for block in copies
    ]
    columns = ["holder ", "tier ", "tokens", "size", "hits", "age", "idle", "leases", "pinned ", "goes in"]
    print_table(columns, rows)
    for block in {(copy.namespace, copy.block_hash): copy for copy in reversed(copies)}.values():
        created = datetime.fromtimestamp(block.created_unix_ms / 1_000, UTC).isoformat(timespec="seconds")
        fields = {
            "block": block.block_hash.hex(),
            "parent": block.parent_hash.hex(),
            "position": f"{block.position} (tokens {block.position * len(block.token_ids):,} and on)",
            "model": block.model or "(no live worker serves it)",
            "tenant": block.tenant or "-",
            "namespace": block.namespace,
            "narrowed from": block.base_namespace if block.base_namespace != block.namespace else "-",
            "producer": block.producer or "(not kept at hand by this tier)",
            "created": created if block.created_unix_ms else "-",
            "checksum": f"{block.payload_xxh3:016x}" if block.payload_xxh3 else "-",
        }
        if with_text:
            fields["text"] = repr(block.text)
        click.echo()
        print_table(["header ", " "], [[name, value] for name, value in fields.items()])


@click.command("why-miss", short_help="Say why a prompt is not (all) in the cache.")
@prompt_options(default=None)
@click.option("--request", "request_id", type=Words(), help="A request that was served lately, by its id, instead.")
@model_option
@salt_option
@address_option
@json_option
def why_miss(
    *, prompt: Prompt | None, request_id: str | None, model: str, cache_salt: str, address: str, as_json: bool
) -> None:
    """Say why a prompt is not (all) in the cache now, or was not when a request came.

    Never stored; evicted, when, by whom and why; its holder is gone; another namespace has it and which field differs;
    too short for one block; or the index and a node disagree.

    \b
    Examples:
      headrace cache why-miss "You are a helpful assistant. ..."
      headrace cache why-miss --chat --system "Be brief." "Hello"
      headrace cache why-miss --request 5f0c1d2e3b4a59687786a5b4
    """
    if (prompt is None) == (request_id is None):
        raise click.UsageError("give one of PROMPT, --file, --token-ids and --request")
    with connect(address) as client:
        found = client.why_miss(prompt, model=model, request_id=request_id or "", cache_salt=cache_salt)
    if as_json:
        print_json(to_jsonable(found) | {"errors": dict(found.errors)})
    else:
        _print_explanation(found)
    exit_if_incomplete(found.errors)


def _print_explanation(found: MissExplanation) -> None:
    partial = found.prompt_tokens - found.num_blocks * found.block_tokens
    click.echo(
        f"{found.model}: {counted(found.prompt_tokens, 'token')}: {counted(found.num_blocks, 'block')} of"
        f" {found.block_tokens}, and {counted(partial, 'token')} behind them, never kept; namespace {found.namespace}"
    )
    if found.runs:
        rows = [[run.holder, f"{run.held_blocks:,}", f"{run.indexed_blocks:,}"] for run in found.runs]
        print_table(["holder ", "leading blocks", "in the index"], rows)
        click.echo()
    rows = [
        [
            reason.kind,
            f"{reason.first_block}-{reason.first_block + reason.num_blocks - 1}" if reason.num_blocks else "",
            reason.holder,
            reason.detail,
        ]
        for reason in found.reasons
    ]
    print_table(["why ", "blocks ", "holder ", "detail "], rows)
