"""gRPC between our own processes over a long life: pinged connections, cancelled calls, servers that restart."""

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path

from store_calls_kit import CLOCK, deadline, publish, read
from store_kit import make_prompt

from headrace.core.errors import CacheFault
from headrace.core.members import StoreNodeRecord
from headrace.transfer import channels
from headrace.transfer.channels import Channels, build_server
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.serve_blocks import serve_blocks

STORMS_MAX = 4  # what is kept for each stream grows with every one of them; what an allocator keeps does not
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1


def frames(connection: socket.socket) -> Iterator[tuple[int, int]]:
    """Type and flags of every HTTP/2 frame that arrives, for a minute at most."""
    end_s, read_bytes = time.monotonic() + 60, b""
    while (left_s := end_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            more = connection.recv(65_536)
        except TimeoutError:
            return
        if not more:
            yield GOAWAY, 0
            return
        read_bytes += more
        while len(read_bytes) >= 9 and len(read_bytes) >= 9 + (length := int.from_bytes(read_bytes[:3])):
            yield read_bytes[3], read_bytes[4]
            read_bytes = read_bytes[9 + length :]


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, 0]) + bytes(4) + payload


async def test_a_connection_without_calls_may_be_pinged_as_often_as_anybody_likes(nodes) -> None:
    """Fails when a node answers pings with GOAWAY ("too many pings"): it cuts off payloads that are under way."""
    node = await nodes.start()
    host, _, port = node.record.address.partition(":")

    def ping_often() -> list[tuple[int, int]]:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(PREFACE + frame(SETTINGS))
            for number in range(40):
                connection.sendall(frame(PING, struct.pack(">Q", number)))
                time.sleep(0.01)
            seen = []
            for seen_frame in frames(connection):
                seen.append(seen_frame)
                if seen_frame == (GOAWAY, 0) or seen.count((PING, ACK)) == 40:
                    break
            return seen

    seen = await asyncio.to_thread(ping_often)
    assert (GOAWAY, 0) not in seen
    assert seen.count((PING, ACK)) == 40


def test_both_ends_agree_on_pings_and_sizes() -> None:
    """Fails when one end's setting is changed alone: the other drops pings or refuses messages that come."""
    client, server = dict(channels._CHANNEL_OPTIONS), dict(channels._SERVER_OPTIONS)
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    for limit in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        assert client[limit] == server[limit]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


async def test_a_thousand_cancelled_streams_leave_neither_memory_nor_files_on_either_end(nodes) -> None:
    """Fails when a stream that its reader gave up, or a call object that was dropped, keeps buffers or sockets."""
    node = await nodes.start(arena_mb=16)
    store, prompt = nodes.grpc(node.record), make_prompt(1, 8)
    await publish(store, prompt, range(8))
    chosen = random.Random(7)

    async def give_up() -> None:
        lease = await store.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
        assert lease.headers
        async with aclosing(store.fetch_blocks(lease, deadline=deadline())) as payloads:
            with suppress(TimeoutError):
                async with asyncio.timeout(chosen.random() * 0.005):
                    async for _ in payloads:
                        if chosen.random() < 0.2:
                            break
        await store.release(lease)

    def drop() -> None:
        nodes.channels.to(node.record.address).unary_stream("/headrace.v1.BlockStore/Fetch")(b"", timeout=5)

    async def storm(num_streams: int) -> None:
        for _ in range(num_streams // 20):
            await asyncio.gather(*(give_up() for _ in range(20)))
            drop()

    pids = (os.getpid(), node.process.pid)
    await storm(300)
    tasks, files = len(asyncio.all_tasks()), {pid: open_files(pid) for pid in pids}
    for _ in range(STORMS_MAX):
        before = {pid: resident_kib(pid) for pid in pids}
        await storm(1_000)
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > tasks + 2 or any(open_files(pid) > files[pid] + 2 for pid in pids):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        after = {pid: resident_kib(pid) for pid in pids}
        if all(after[pid] <= before[pid] * 1.1 + 4 * 1024 for pid in pids):
            break
    else:
        raise AssertionError(f"each storm leaves more: {before} KiB before the last, {after} after it")
    assert len(await read(store, prompt)) == 8


async def test_a_server_that_restarts_again_and_again_costs_no_sockets(nodes) -> None:
    """Fails when each reconnect leaves a socket, or a client waits longer and longer before it connects again."""
    prompt, port = make_prompt(1, 2), 0
    files, own = 0, Channels()
    async with nodes.inside() as service:
        for restart in range(20):
            server = build_server()
            serve_blocks(server, service.node)
            port = server.add_insecure_port(f"127.0.0.1:{port}")
            await server.start()
            store = GrpcStore(StoreNodeRecord("n", 1, "h", f"127.0.0.1:{port}", "", pid=1), own, CLOCK)
            async with asyncio.timeout(20):
                while True:
                    with suppress(CacheFault):
                        await store.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline(1))
                        break
                    await asyncio.sleep(0.02)
            await server.stop(0)
            if restart == 4:
                files = open_files(os.getpid())
        await own.close()
        assert open_files(os.getpid()) <= files + 3
