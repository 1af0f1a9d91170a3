"""Follow one store node's KV events: every event once and in order, gaps filled by replay. `docs/kv-events.md` as code.

Needs pyzmq (`headrace[events]`). Reads maps and arrays; blocking, for one thread. Nothing says that it is a node who
sends: a message that has no number is passed over, and a batch that cannot be read is told of as one that was missed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from headrace.core.index_limits import (
    KV_EVENTS_FOLLOWED_BATCH_BYTES_MAX,
    KV_EVENTS_REPLAY_AHEAD_BATCHES,
    KV_EVENTS_REPLAY_TIMEOUT_MS,
)

_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_UNIX_S_MAX = 2**40  # a time of day can be made of every second before it
# What an array holds after its name; a map names its fields itself.
_ARRAY_FIELDS = {
    "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name".split(),
    "BlockRemoved": "block_hashes medium".split(),
    "AllBlocksCleared": [],
}


MISSED = "Missed"


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """One event with the number and the time of the batch that it came in.

    Beside vLLM's events there is `Missed`, with `num_batches`: they are lost to this follower, and what it holds may be
    wrong until the next AllBlocksCleared.
    """

    sequence: int
    unix_s: float
    name: str
    fields: dict[str, Any]


def follow_kv_events(endpoint: str, *, replay_endpoint: str = "", topic: str = "") -> Iterator[SeenEvent]:
    """Connect and yield events until closed. With a replay endpoint, first AllBlocksCleared and all that is held.

    Raises ValueError for an endpoint that is none. A node that is away is waited for; it comes back as a gap.
    """
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        live.subscribe(topic)
        _connect(live, endpoint)
        last = -1
        if replay_endpoint:
            # Subscribed first: what happens between the replay and the first live message is a gap like any other.
            for sequence, payload in _replay(context, replay_endpoint, 0):
                yield from _events(sequence, payload)
                last = sequence
        while True:
            numbered = _numbered(live.recv_multipart())
            if numbered is None:
                continue
            sequence, payload = numbered
            if last >= 0 and sequence > last + 1:
                first = last + 1
                for replayed, old in _replay(context, replay_endpoint, first) if replay_endpoint else ():
                    if replayed > last:
                        yield from _events(replayed, old)
                        last = replayed
                if last < sequence - 1:
                    num_batches = sequence - 1 - last
                    yield SeenEvent(sequence, time.time(), MISSED, {"num_batches": num_batches})
            if sequence > last:
                yield from _events(sequence, payload)
                last = sequence


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    socket.linger = 0
    socket.maxmsgsize = KV_EVENTS_FOLLOWED_BATCH_BYTES_MAX  # whoever sends more is cut off
    socket.rcvhwm = KV_EVENTS_REPLAY_AHEAD_BATCHES
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{endpoint}: {error}") from error


def _replay(context: "zmq.Context[Any]", endpoint: str, start: int) -> Iterator[tuple[int, bytes]]:
    """Batches from `start` on; nothing more when the node does not answer in time."""
    with context.socket(zmq.DEALER) as asking:
        _connect(asking, endpoint)
        asking.send_multipart([b"", start.to_bytes(_SEQUENCE_BYTES, "big")])
        while asking.poll(KV_EVENTS_REPLAY_TIMEOUT_MS):
            frames = asking.recv_multipart()
            if len(frames) == 3 and frames[1] == _END:
                return
            numbered = _numbered(frames)
            if numbered is not None:
                yield numbered


def _numbered(frames: list[bytes]) -> tuple[int, bytes] | None:
    """A message's sequence number and payload; None for what is no batch."""
    if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
        return None
    return int.from_bytes(frames[1], "big"), frames[2]


def _events(sequence: int, payload: bytes) -> list[SeenEvent]:
    """A batch's events; Missed for one that cannot be read."""
    try:
        return read_batch(sequence, payload)
    except JunkBatch:
        return [SeenEvent(sequence, time.time(), MISSED, {"num_batches": 1})]


class JunkBatch(Exception):
    """Bytes that are no batch of events."""


def read_batch(sequence: int, payload: bytes) -> list[SeenEvent]:
    """All events of a batch. What this file knows the fields of is checked; events of other names are passed on as they
    are. Raises JunkBatch."""
    try:
        batch = msgpack.unpackb(payload)
    except Exception as error:  # msgpack's own errors have no common class
        raise JunkBatch(str(error)) from error
    _require(isinstance(batch, list) and len(batch) >= 2)
    unix_s, events = batch[:2]
    _require(isinstance(unix_s, int | float) and 0 <= unix_s < _UNIX_S_MAX and isinstance(events, list))
    return [SeenEvent(sequence, unix_s, *_named(event)) for event in events]


def _named(event: Any) -> tuple[str, dict[str, Any]]:
    """An event's name and fields, in whichever layout."""
    if isinstance(event, dict):
        _require(all(isinstance(key, str) for key in event))
        name, fields = event.get("type"), {key: value for key, value in event.items() if key != "type"}
    else:
        _require(isinstance(event, list) and len(event) > 0)
        name = event[0]
        known = _ARRAY_FIELDS.get(name, ()) if isinstance(name, str) else ()
        fields = dict(zip(known, event[1:], strict=False))
    _require(isinstance(name, str))
    if name in _FIELD_CHECKS:
        for field, is_right in _FIELD_CHECKS[name].items():
            _require(field in fields and is_right(fields[field]))
    return str(name), fields


def _is_hash(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _are_hashes(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_hash, value))


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) for token in value)


_FIELD_CHECKS = {
    "BlockStored": {
        "block_hashes": _are_hashes,
        "parent_block_hash": lambda value: value is None or _is_hash(value),
        "token_ids": _are_tokens,
    },
    "BlockRemoved": {"block_hashes": _are_hashes},
}


def _require(holds: bool) -> None:
    if not holds:
        raise JunkBatch("not a batch of events")
