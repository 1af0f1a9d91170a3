"""`headrace nodes ls` and `nodes drain`: store nodes, and taking one out of service without losing what it holds."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.selection import Words
from headrace.admin.terminal import (
    EXIT_INCOMPLETE,
    exit_if_incomplete,
    human_bytes,
    json_option,
    print_json,
    print_table,
    say,
)
from headrace.client import DrainProgress, HolderStat, StoreNodeStatus
from headrace.core.block import Tier

PROGRESS_EVERY_S = 1.0


@click.group(short_help="List store nodes, and drain one.")
def nodes() -> None:
    """Store nodes: what each has, and draining one before it is taken away."""


@nodes.command("ls", short_help="List live store nodes.")
@address_option
@json_option
def list_nodes(*, address: str, as_json: bool) -> None:
    """List live store nodes: where they are, how full each tier is, what is pinned, and which of them drain.

    A node that is alive but does not answer is listed with what its record says; then the exit code is 9.

    \b
    Examples:
      headrace nodes ls
      headrace nodes ls --json | jq -r '.nodes[] | select(.draining) | .node_id'
    """
    with connect(address) as client:
        status, stats = client.status(), client.stat()
    found = [(node, [stat for stat in stats if stat.holder == node.holder]) for node in status.store_nodes]
    errors = {stat.holder: stat.error for _, tiers in found for stat in tiers if stat.error}
    if as_json:
        print_json({"nodes": [_node_json(node, tiers) for node, tiers in found], "errors": errors})
    else:
        columns = ["node ", "state ", "host ", "address ", "incarnation", "arena", "disk", "blocks", "pinned"]
        print_table(columns, [_node_row(node, tiers) for node, tiers in found])
        if not found:
            say("no store node is alive" if status.index_available else "the index is away: nobody knows which live")
    exit_if_incomplete(list(errors.items()))


def _node_json(node: StoreNodeStatus, tiers: Sequence[HolderStat]) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "host": node.host,
        "address": node.address,
        "incarnation": node.incarnation,
        "pid": node.pid,
        "metrics_port": node.metrics_port,
        "draining": node.draining,
        "tiers": tiers,
    }


def _node_row(node: StoreNodeStatus, tiers: Sequence[HolderStat]) -> list[str]:
    by_tier = {stat.tier: stat for stat in tiers if not stat.error}
    host = by_tier.get(Tier.HOST)
    pinned = f"{human_bytes(host.pinned_bytes)} of {human_bytes(host.pin_bytes_max)}" if host else "?"
    return [
        node.node_id,
        "draining" if node.draining else "serving",
        node.host,
        node.address,
        str(node.incarnation),
        _room(host) if host else "?",
        _room(by_tier[Tier.DISK]) if Tier.DISK in by_tier else "-" if host else "?",
        ", ".join(f"{by_tier[tier].committed_blocks:,} {tier}" for tier in (Tier.HOST, Tier.DISK) if tier in by_tier),
        pinned,
    ]


def _room(stat: HolderStat) -> str:
    if not stat.total_blocks:
        return "empty"  # it counts its room in blocks, and has not seen one yet
    used, total = stat.committed_blocks * stat.block_bytes, stat.total_blocks * stat.block_bytes
    return f"{human_bytes(used)} of {human_bytes(total)}"


@nodes.command("drain", short_help="Move a node's blocks to its peers.")
@click.argument("node", metavar="NODE", type=Words())
@click.option("--undo", is_flag=True, help="Have it take new blocks again.")
@click.option("--without-moving", is_flag=True, help="Have it take no new blocks, and move none.")
@address_option
@json_option
def drain_node(*, node: str, undo: bool, without_moving: bool, address: str, as_json: bool) -> None:
    """Have a store node take no new blocks, and give those it has to other nodes, those used most first.

    It goes on serving reads, so the workers on its host lose nothing until it is stopped. When this command ends well
    every block is on a peer, and the node can go. Ctrl-C stops watching and moving; the node goes on taking no new
    blocks until --undo.

    Exit code 9: a block is on this node alone still, or the drain failed.

    \b
    Examples:
      headrace nodes drain host-3
      headrace nodes drain host-3 --without-moving
      headrace nodes drain host-3 --undo
    """
    if undo and without_moving:
        raise click.UsageError("--undo and --without-moving contradict each other; leave one out")
    holder = f"node:{node.removeprefix('node:')}"
    with connect(address) as client:
        last = _follow(client.drain_node(holder, undo=undo, without_moving=without_moving), holder)
    if last is None or not last.done:
        say(f"incomplete: {holder}: the drain ended without a last word; `headrace nodes ls` says how the node is")
        raise SystemExit(EXIT_INCOMPLETE)
    stayed = 0 if undo or without_moving else last.total_blocks - last.moved_blocks - last.present_blocks
    if as_json:
        print_json({"holder": holder, "stayed_blocks": stayed, "progress": last})
    else:
        click.echo(f"{holder} is {last.state}" + ("" if undo or without_moving else f": {_describe(last, stayed)}"))
    if last.error or stayed:
        exit_if_incomplete([(holder, last.error or f"blocks that are on this node alone: {stayed:,}")])


def _follow(progress: Iterator[DrainProgress], holder: str) -> DrainProgress | None:
    """Say how far it is, at most once a second; returns the last that was heard."""
    said_at_s, step = time.monotonic(), None
    for step in progress:
        now_s = time.monotonic()
        if not step.done and now_s - said_at_s >= PROGRESS_EVERY_S:
            done = step.moved_blocks + step.present_blocks + step.refused_blocks
            say(f"[{done:,}/{step.total_blocks:,}] {holder}: moved {human_bytes(step.moved_bytes)}")
            said_at_s = now_s
    return step


def _describe(last: DrainProgress, stayed: int) -> str:
    moved = f"{last.moved_blocks:,} of {last.total_blocks:,} blocks moved ({human_bytes(last.moved_bytes)})"
    if last.moved_to:
        moved += " to " + ", ".join(f"node:{node_id} {blocks:,}" for node_id, blocks in last.moved_to.items())
    present = f"{last.present_blocks:,} a peer had already"
    refused = f" ({last.refused_blocks:,}: no peer had room)" if last.refused_blocks else ""
    return f"{moved}, {present}, {stayed:,} stay here alone{refused}"
