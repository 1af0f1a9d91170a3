"""Follow one store node's KV events: every event once and in order, gaps filled by replay. `docs/kv-events.md` as code.

Needs pyzmq (`headrace[events]`). Reads maps and arrays; blocking, for one thread.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from headrace.core.index_limits import KV_EVENTS_REPLAY_TIMEOUT_MS

_END = (-1).to_bytes(8, "big", signed=True)
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
        live.linger = 0
        live.subscribe(topic)
        _connect(live, endpoint)
        last = -1
        if replay_endpoint:
            # Subscribed first: what happens between the replay and the first live message is a gap like any other.
            for sequence, payload in _replay(context, replay_endpoint, 0):
                yield from _events(sequence, payload)
                last = sequence
        while True:
            _, number, payload = live.recv_multipart()
            sequence = int.from_bytes(number, "big")
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
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{endpoint}: {error}") from error


def _replay(context: "zmq.Context[Any]", endpoint: str, start: int) -> Iterator[tuple[int, bytes]]:
    """Batches from `start` on; nothing more when the node does not answer in time."""
    with context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        _connect(asking, endpoint)
        asking.send_multipart([b"", start.to_bytes(8, "big")])
        while asking.poll(KV_EVENTS_REPLAY_TIMEOUT_MS):
            _, number, payload = asking.recv_multipart()
            if number == _END:
                return
            yield int.from_bytes(number, "big"), payload


def _events(sequence: int, payload: bytes) -> Iterator[SeenEvent]:
    unix_s, events, *_ = msgpack.unpackb(payload)
    for event in events:
        if isinstance(event, dict):
            name, fields = event["type"], {key: value for key, value in event.items() if key != "type"}
        else:
            name = event[0]
            fields = dict(zip(_ARRAY_FIELDS.get(name, ()), event[1:], strict=False))
        yield SeenEvent(sequence, unix_s, name, fields)
