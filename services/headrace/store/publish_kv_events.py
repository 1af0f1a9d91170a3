"""Send a store node's KV events to whoever subscribes, and replay what a subscriber missed. ZeroMQ is only here.

Live: a PUB socket, messages of three frames: topic, sequence number (8 bytes, big-endian), payload. PUB never waits
for a subscriber: one that is too slow or gone loses messages, sees the gap in the numbers, and asks for a replay.

Replay: a ROUTER socket. Request: empty frame, start sequence (8 bytes, big-endian). Replies: empty frame, sequence,
payload, one per batch; then the end marker, sequence -1 with an empty payload. One request is answered at a time, in a
bounded time, at the pace at which the asker takes it.
"""

import asyncio
import errno
import logging
from dataclasses import dataclass

import zmq
import zmq.asyncio

from headrace.config import StoreSettings
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import ConfigInvalid
from headrace.core.index_limits import (
    KV_EVENTS_HEARTBEAT_MS,
    KV_EVENTS_REPLAY_AHEAD_BATCHES,
    KV_EVENTS_REPLAY_POLL_MS,
    KV_EVENTS_REPLAY_TIMEOUT_MS,
    KV_EVENTS_REQUEST_BYTES_MAX,
    KV_EVENTS_REQUESTS_MAX,
    KV_EVENTS_SUBSCRIBER_BATCHES_MAX,
)
from headrace.store.kv_event_log import EventBatch, KvEventLog

_log = logging.getLogger(__name__)
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)


async def publish_kv_events(log: KvEventLog, sockets: "KvEventSockets", *, clock: Clock) -> None:
    """Send batches as they come and answer replay requests, until cancelled. The caller closes the sockets."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_send_live(log, sockets))
        if sockets.replay is not None:
            requests: asyncio.Queue[_Request] = asyncio.Queue(KV_EVENTS_REQUESTS_MAX)
            tasks.create_task(_read_requests(sockets.replay, requests))
            tasks.create_task(_answer_requests(log, sockets.replay, requests, clock))


@dataclass(frozen=True, slots=True)
class _Request:
    """A replay that somebody asked for."""

    asker: bytes
    start: int


class KvEventSockets:
    """The two sockets of one publisher; used by one event loop."""

    def __init__(self, settings: StoreSettings, *, node_id: str) -> None:
        """Bind, or connect where the endpoint begins with `>`. Raises ConfigInvalid; then nothing is left open."""
        self._context = zmq.asyncio.Context()
        self._topic = (settings.kv_events_topic or f"kv@{node_id}").encode()
        self.replay: zmq.asyncio.Socket | None = None
        try:
            self._live = self._context.socket(zmq.PUB)
            self._live.setsockopt(zmq.SNDHWM, KV_EVENTS_SUBSCRIBER_BATCHES_MAX)
            _open(self._live, "kv_events_endpoint", settings.kv_events_endpoint)
            if settings.kv_events_replay_endpoint:
                self.replay = self._context.socket(zmq.ROUTER)
                # Without it ROUTER drops what a slow asker has no room for, and the asker takes the rest for the whole.
                self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay.setsockopt(zmq.SNDHWM, KV_EVENTS_REPLAY_AHEAD_BATCHES)
                _open(self.replay, "kv_events_replay_endpoint", settings.kv_events_replay_endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where the live socket is bound or connected, with the port that was found for `*`."""
        return self._live.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        """Where replays are asked for; empty without them."""
        return "" if self.replay is None else self.replay.getsockopt_string(zmq.LAST_ENDPOINT)

    async def send(self, batch: EventBatch) -> None:
        """Hand a batch to every subscriber that has room for it. Does not wait for any."""
        frames = [self._topic, batch.sequence.to_bytes(_SEQUENCE_BYTES, "big"), batch.payload]
        await self._live.send_multipart(frames, flags=zmq.NOBLOCK)

    def close(self) -> None:
        """Drop what is unsent and close. Idempotent."""
        self._context.destroy(linger=0)


def _open(socket: zmq.asyncio.Socket, key: str, endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, KV_EVENTS_REQUEST_BYTES_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, KV_EVENTS_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * KV_EVENTS_HEARTBEAT_MS)
    try:
        if endpoint.startswith(">"):
            socket.connect(endpoint[1:])
        else:
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigInvalid(key, f"cannot listen on {endpoint}: {error}") from error


async def _send_live(log: KvEventLog, sockets: KvEventSockets) -> None:
    while True:
        await log.wait()
        for batch in log.take_unsent():
            await sockets.send(batch)
        await asyncio.sleep(0)  # sending does not give way by itself; the node serves readers on this loop


async def _read_requests(socket: zmq.asyncio.Socket, requests: "asyncio.Queue[_Request]") -> None:
    """Keep reading, also while a replay is being sent: ZeroMQ sees that a peer has gone only when it reads from it."""
    said: set[str] = set()

    def say_once(why: str) -> None:  # whoever reaches the socket sends as many as it likes
        if why not in said:
            said.add(why)
            _log.warning("%s; said once", why)

    while True:
        frames = await socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            say_once("a replay request is passed over that is not an empty frame and 8 bytes")
        elif requests.full():
            say_once("a replay request is not answered, since too many came at once")
        else:
            requests.put_nowait(_Request(asker=frames[0], start=int.from_bytes(frames[2], "big")))


async def _answer_requests(
    log: KvEventLog, socket: zmq.asyncio.Socket, requests: "asyncio.Queue[_Request]", clock: Clock
) -> None:
    while True:
        request = await requests.get()
        deadline = Deadline.after(KV_EVENTS_REPLAY_TIMEOUT_MS / 1_000, clock)
        if not await _answer(log, socket, request, deadline):
            _log.info("a replay from %d was not taken to its end", request.start)


async def _answer(log: KvEventLog, socket: zmq.asyncio.Socket, request: _Request, deadline: Deadline) -> bool:
    """Send a replay and its end marker; False, without the marker, when its asker has gone or its time is up."""
    for batch in log.replay(request.start):
        frames = [request.asker, b"", batch.sequence.to_bytes(_SEQUENCE_BYTES, "big"), batch.payload]
        if not await _deliver(socket, frames, deadline):
            return False
    return await _deliver(socket, [request.asker, b"", _END, b""], deadline)


async def _deliver(socket: zmq.asyncio.Socket, frames: list[bytes], deadline: Deadline) -> bool:
    """Send one reply as soon as the asker has room for it; False when it has gone or the deadline passed."""
    while True:
        try:
            await socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            if not deadline.left_s():
                return False
            await asyncio.sleep(KV_EVENTS_REPLAY_POLL_MS / 1_000)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        else:
            await asyncio.sleep(0)  # give way to readers of blocks between two replies
            return True
