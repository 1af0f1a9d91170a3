"""`headrace cache events`: what one store node stores and removes, live, as routers that follow it are told."""

import json
import time
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import click

from headrace.admin.terminal import ExtraMissing, json_lines_option, say, to_jsonable

if TYPE_CHECKING:
    from headrace.client.follow_kv_events import SeenEvent


@click.command("events", short_help="Follow what a store node stores and removes.")
@click.option("--endpoint", default="tcp://127.0.0.1:5557", show_default=True, help="The node's kv_events_endpoint.")
@click.option("--replay-endpoint", default="", help="Its kv_events_replay_endpoint: begin with all that it holds.")
@click.option("--topic", default="", help="Only batches whose topic begins so.")
@click.option("--count", type=click.IntRange(min=1), default=None, help="End after so many events. Default: Ctrl-C.")
@json_lines_option
def events(*, endpoint: str, replay_endpoint: str, topic: str, count: int | None, as_json: bool) -> None:
    """Follow a store node that sends KV events (setting kv_events_endpoint).

    A line is one event: when, how many blocks and tokens, the last block's hash and the hash it stands on. With a
    replay endpoint, gaps are filled; without one they are shown as MISSED. --json has every field of an event.

    \b
    Examples:
      headrace cache events
      headrace cache events --replay-endpoint tcp://127.0.0.1:5558
      headrace cache events --json | jq -c 'select(.event == "BlockRemoved")'
    """
    try:
        from headrace.client.follow_kv_events import follow_kv_events
    except ModuleNotFoundError as error:
        raise ExtraMissing("cache events", "events", error.name or "zmq") from error
    say(f"following {endpoint}; a node sends events where its setting kv_events_endpoint is set. Ctrl-C ends it.")
    following = follow_kv_events(endpoint, replay_endpoint=replay_endpoint, topic=topic)
    try:
        _print_events(islice(following, count), as_json=as_json)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        return  # how following ends


def _print_events(seen: "Iterable[SeenEvent]", *, as_json: bool) -> None:
    for event in seen:
        # Not held back until a pipe's buffer is full: this is watched live.
        click.echo(event_as_json(event) if as_json else event_as_line(event))


def event_as_json(event: "SeenEvent") -> str:
    """One JSON document, with every field that the event came with."""
    shown = {key: to_jsonable(value) for key, value in event.fields.items()}
    return json.dumps({**shown, "event": event.name, "sequence": event.sequence, "unix_s": event.unix_s}, default=str)


def event_as_line(event: "SeenEvent") -> str:
    """One line to read."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.unix_s))
    hashes = event.fields.get("block_hashes", [])
    match event.name:
        case "BlockStored":
            tokens, parent = len(event.fields["token_ids"]), event.fields["parent_block_hash"]
            stands_on = "" if parent is None else f" after {_hash(parent)}"
            return f"{clock}  stored    {len(hashes):5,} blocks {tokens:8,} tokens  {_hash(hashes[-1])}{stands_on}"
        case "BlockRemoved":
            return f"{clock}  removed   {len(hashes):5,} blocks {'':8}         {_hash(hashes[-1])}"
        case "AllBlocksCleared":
            return f"{clock}  cleared   all that was held before"
        case "Missed":
            return f"{clock}  MISSED    {event.fields['num_batches']:,} batches; what was shown may not hold any more"
        case _:
            return f"{clock}  {event.name if event.name.isprintable() else ascii(event.name)}"


def _hash(block_hash: int | bytes) -> str:
    """The last 16 hex digits: how hashes sent as integers and as bytes, and those of `cache ls`, are compared."""
    return f"{block_hash:016x}" if isinstance(block_hash, int) else block_hash[-8:].hex()
