"""More of what an attacker tries: requests that two readers would read differently, and floods of small things. Run
this file to print the whole table of docs/security.md."""

import asyncio
import gzip
import json
import re
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import attacks
import grpc
from attacked_system import ATTACKER, OPERATOR, PROMPT, VICTIM, AttackedSystem
from attacks import attack, code_of, complete, ended, generate, metadata, post, raw, refused
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.core.front_door_limits import HEALTH_WATCHES_MAX, HTTP_HEAD_BYTES_MAX
from headrace.core.limits import GATEWAY_INFLIGHT_MAX, GRPC_MESSAGE_BYTES_MAX
from headrace.gateway.serve_grpc import serve_grpc
from headrace.transfer.channels import FRONT_DOOR_OPTIONS, Channels
from headrace.wire.v1 import admin_pb2, inference_pb2

BODY = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 2}).encode()
SMUGGLED = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"


def head(system: AttackedSystem, *lines: bytes, of: bytes = b"POST /v1/completions") -> bytes:
    """The head of an attacker's request, with these lines besides."""
    authorization = b"authorization: " + system.as_(ATTACKER)["authorization"].encode()
    return b"\r\n".join([of + b" HTTP/1.1", b"host: x", authorization, *lines, b"", b""])


async def answers(url: str, *packets: bytes) -> list[str]:
    """Every status that comes for these until the server closes, each of them a packet of its own."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    reading = asyncio.create_task(reader.read())
    try:
        for packet in packets:
            if reading.done():
                break  # it has answered, and ended its side
            writer.write(packet)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            return re.findall(r"HTTP/1\.1 (\d{3}) ", (await reading).decode())  # one may begin right behind a body
    finally:
        reading.cancel()
        writer.transport.abort()


@attack(
    "a request in the body of one that asks for an Upgrade, and an honest one that asks for it",
    answer="400 to the body, 200 to the honest one, none to what is in the body",
    counted=refused("invalid"),
)
async def behind_an_upgrade(system: AttackedSystem) -> str:
    attacks_head = head(system, b"connection: upgrade", b"upgrade: websocket", b"content-length: %d" % len(SMUGGLED))
    java = (b"connection: Upgrade, HTTP2-Settings, close", b"upgrade: h2c", b"http2-settings: AAEAAEAAAAIAAAAB")
    honest = head(system, *java, b"content-type: application/json", b"content-length: %d" % len(BODY)) + BODY
    to_body, to_honest, *more = await answers(system.url, attacks_head, SMUGGLED, honest)
    return f"{to_body} to the body, {to_honest} to the honest one, {more or 'none'} to what is in the body"


@attack("content-length beside transfer-encoding", answer="400", counted=ended("malformed"))
async def two_lengths(system: AttackedSystem) -> str:
    whole = head(system, b"content-length: 5", b"transfer-encoding: chunked")
    return " ".join(await answers(system.url, whole + b"0\r\n\r\n" + SMUGGLED))


@attack("two lengths that differ", answer="400", counted=ended("malformed"))
async def differing_lengths(system: AttackedSystem) -> str:
    return " ".join(
        await answers(system.url, head(system, b"content-length: 2", b"content-length: 40") + b"{}" + SMUGGLED)
    )


@attack("transfer-encoding spelled so that one reader passes over it", answer="400", counted=ended("malformed"))
async def odd_encodings(system: AttackedSystem) -> str:
    odd = (b"transfer-encoding : chunked", b"transfer-encoding: chunked, identity", b"transfer-encoding:\n chunked")
    found = {" ".join(await answers(system.url, head(system, line) + b"0\r\n\r\n" + SMUGGLED)) for line in odd}
    return " ".join(found)


@attack("a header that ends in a line feed alone", answer="400", counted=ended("malformed"))
async def bare_line_feed(system: AttackedSystem) -> str:
    return " ".join(await answers(system.url, head(system, b"x: y\ncontent-length: 5", b"connection: close")))


@attack("a header for the answer, by way of x-request-id", answer="400", counted=ended("malformed"))
async def header_for_the_answer(system: AttackedSystem) -> str:
    return " ".join(await answers(system.url, head(system, b"x-request-id: a\rset-cookie: b", of=b"GET /v1/models")))


@attack("10,000 requests in one packet", answer="400", counted=ended("requests_ahead"))
async def many_at_once(system: AttackedSystem) -> str:
    return await raw(system.url, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000)


@attack("trailers without end", answer="431", counted=ended("head_bytes"))
async def endless_trailers(system: AttackedSystem) -> str:
    chunks = b"2\r\n{}\r\n0\r\n"
    line = b"x-more: " + b"v" * 1_000 + b"\r\n"
    many = [line * 100] * (2 * HTTP_HEAD_BYTES_MAX // (100 * len(line)) + 2)
    return " ".join(await answers(system.url, head(system, b"transfer-encoding: chunked") + chunks, *many))


@attack("a body that drips", answer="408", counted=ended("body_time"))
async def dripping_body(system: AttackedSystem) -> str:
    first = head(system, b"content-length: 100000")
    return " ".join(await answers(system.impatient_url, first, *[b"x"] * 20))


@attack("a handshake of WebSockets, to leave HTTP's bounds", answer="404", counted=refused("invalid"))
async def web_socket(system: AttackedSystem) -> str:
    lines = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: eA==", b"sec-websocket-version: 13")
    return " ".join(await answers(system.url, head(system, *lines, of=b"GET /ws"), b"\x81\x85\x00\x00\x00\x00hello"))


@attack("a compressed body", answer="400", counted=refused("invalid"))
async def compressed_body(system: AttackedSystem) -> str:
    packed = gzip.compress(b" " * 10_000_000 + BODY)
    length = b"content-length: %d" % len(packed)
    whole = head(system, b"content-encoding: gzip", b"content-type: application/json", length, b"connection: close")
    return " ".join(await answers(system.url, whole + packed))


@attack(
    "a compressed gRPC message, small until it is unpacked", answer="RESOURCE_EXHAUSTED", counted=refused("invalid")
)
async def compressed_message(system: AttackedSystem) -> str:
    message = inference_pb2.GenerateRequest(model="tiny", text="x" * (2 * GRPC_MESSAGE_BYTES_MAX)).SerializeToString()
    call = system.grpc_channel.unary_unary("/headrace.v1.CacheAdmin/Stat")
    return await code_of(call(message, metadata=metadata(system, OPERATOR), compression=grpc.Compression.Gzip))


@attack("1 MB of gRPC metadata", answer="RESOURCE_EXHAUSTED", counted="")
async def much_metadata(system: AttackedSystem) -> str:
    flood = tuple((f"x-{number}", "v" * 1_000) for number in range(1_000))
    return await code_of(system.admin.Stat(admin_pb2.StatRequest(), metadata=(*metadata(system, OPERATOR), *flood)))


@attack(
    "gRPC calls whose message does not come, by the thousand", answer="DEADLINE_EXCEEDED", counted=refused("deadline")
)
async def no_messages(system: AttackedSystem) -> str:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.impatient_grpc_port}") as channel:
        call = channel.stream_stream("/headrace.v1.Inference/Generate")
        await asyncio.gather(*(code_of(call().read()) for _ in range(2 * 2 * GATEWAY_INFLIGHT_MAX)))
        served = await code_of(
            channel.unary_unary("/headrace.v1.Inference/ListModels")(b"", metadata=metadata(system, VICTIM))
        )
        assert served == "OK", f"{served} for others"
        return await code_of(call().read())


@attack(
    "a gRPC stream that its client never reads",
    answer="work ended",
    counted='headrace_client_requests_total{outcome="cancelled"}',
)
async def never_reads_grpc(system: AttackedSystem) -> str:
    request = inference_pb2.GenerateRequest(model="tiny", text=PROMPT).SerializeToString()
    counter = 'headrace_client_requests_total{outcome="cancelled"}'
    before = system.counts()[counter]
    _, writer = await asyncio.open_connection("127.0.0.1", system.impatient_grpc_port)
    try:
        writer.write(unread_call("/headrace.v1.Inference/Generate", request, **system.as_(ATTACKER)))
        async with asyncio.timeout(60):
            while system.counts()[counter] == before:  # noqa: ASYNC110 - a client that does not read hears nothing
                await asyncio.sleep(0.01)
        await system.at_rest()
    finally:
        writer.transport.abort()
    return "work ended"


@asynccontextmanager
async def grpc_door(system: AttackedSystem, *options: tuple[str, int]) -> AsyncIterator[int]:
    """The port of one more gRPC server of the gateway's, with these bounds smaller than they are."""
    channels = Channels()
    server, port = await serve_grpc(
        system.gateway.service,
        address="127.0.0.1:0",
        channel_to=channels.to,
        options=tuple((dict(FRONT_DOOR_OPTIONS) | dict(options)).items()),
    )
    try:
        yield port
    finally:
        await server.stop(0)
        await channels.close()


def unread_call(path: str, message: bytes = b"", **metadata: str) -> bytes:
    """HTTP/2 as a client sends it that allows nothing of the answer: settings, and one call."""
    pairs = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"} | metadata
    pairs["content-type"] = "application/grpc"
    head = b"".join(bytes([0, len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in pairs.items())
    body = struct.pack(">BL", 0, len(message)) + message
    frames = ((4, 0, 0, struct.pack(">HL", 4, 0)), (1, 4, 1, head), (0, 1, 1, body))
    spelled = (
        struct.pack(">LBL", len(payload) << 8 | kind, flags, of) + payload for kind, flags, of, payload in frames
    )
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(spelled)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes the connection, or resets it."""
    found = b""
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            while some := await reader.read(1 << 16):
                found += some
    return found


@attack("health's answers left unread, without a key, to keep their places", answer="connection closed", counted="")
async def unread_health(system: AttackedSystem) -> str:
    ages = (("grpc.max_connection_age_ms", 200), ("grpc.max_connection_age_grace_ms", 200))
    async with grpc_door(system, *ages) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(unread_call("/grpc.health.v1.Health/Check"))
        rest, kinds = await read_all(reader), set()
        writer.transport.abort()
    while rest:
        high, low, kind, _, of = struct.unpack(">HBBBL", rest[:9])
        kinds.add((kind, of))
        rest = rest[9 + (high << 8 | low) :]
    assert (1, 1) in kinds, "the call's answer began"
    assert (0, 1) not in kinds, "and was not let through"
    return "connection closed"


@attack("more gRPC connections than there may be", answer="connection closed", counted="")
async def many_connections(system: AttackedSystem) -> str:
    async with grpc_door(system, ("grpc.max_allowed_incoming_connections", 2)) as port:
        opened = []
        try:
            for _ in range(3):
                opened.append(await asyncio.open_connection("127.0.0.1", port))
                opened[-1][1].write(unread_call("/grpc.health.v1.Health/Check"))
                if len(opened) < 3:
                    await opened[-1][0].readexactly(9)  # a server's settings
            assert await read_all(opened[-1][0]) == b""
        finally:
            for _, writer in opened:
                writer.transport.abort()
    return "connection closed"


@attack("a store node's call to a gateway", answer="UNIMPLEMENTED", counted=refused("invalid"))
async def inner_call(system: AttackedSystem) -> str:
    call = system.grpc_channel.unary_unary("/headrace.v1.NodeAdmin/SetBudgets")
    return await code_of(call(b"", metadata=metadata(system, ATTACKER)))


@attack("watching health more often than is allowed", answer="RESOURCE_EXHAUSTED", counted=refused("no_room"))
async def many_watches(system: AttackedSystem) -> str:
    health = health_pb2_grpc.HealthStub(system.grpc_channel)
    async with AsyncExitStack() as stack:
        for _ in range(HEALTH_WATCHES_MAX):
            watch = health.Watch(health_pb2.HealthCheckRequest())
            stack.callback(watch.cancel)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        return await code_of(health.Watch(health_pb2.HealthCheckRequest()).read())


@attack("the metrics of all tenants, with a tenant's key", answer="403", counted=refused("permission_denied"))
async def metrics_of_all(system: AttackedSystem) -> str:
    async with system.http() as http:
        return str((await http.get("/metrics", headers=system.as_(ATTACKER))).status_code)


async def request_id_of(system: AttackedSystem, tenant: str) -> str:
    """Of a request that was just served."""
    request = inference_pb2.GenerateRequest(model="tiny", text=PROMPT)
    request.sampling.max_tokens = 2
    call = system.inference.Generate(request, metadata=metadata(system, tenant))
    events = [event async for event in call]
    return events[0].accepted.request_id


@attack(
    "where another tenant's request went, by its id",
    answer="the same words as for no request",
    counted=refused("invalid"),
)
async def others_route(system: AttackedSystem) -> str:
    return await same_words(system, system.admin.ExplainRoute, admin_pb2.ExplainRouteRequest)


@attack(
    "why another tenant's request missed, by its id",
    answer="the same words as for no request",
    counted=refused("invalid"),
)
async def others_miss(system: AttackedSystem) -> str:
    return await same_words(system, system.admin.WhyMiss, admin_pb2.WhyMissRequest)


@attack("another tenant's prompt_cache_key", answer="0 cached tokens", counted="")
async def others_cache_key(system: AttackedSystem) -> str:
    async def cached(tenant: str) -> int:
        body = {"model": "tiny", "prompt": "key: " + PROMPT, "max_tokens": 2, "prompt_cache_key": "victims"}
        async with system.http() as http:
            reply = await http.post("/v1/completions", json=body, headers=system.as_(tenant))
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    await cached(VICTIM)
    assert await cached(VICTIM) > 0, "without the victim's hit nothing is tried"
    return f"{await cached(ATTACKER)} cached tokens"


@attack("a cache_salt that looks like another one", answer="0 cached tokens", counted="")
async def lookalike_salt(system: AttackedSystem) -> str:
    """Composed and decomposed, and with a letter of another script."""
    for salt in ("caf\u00e9", "cafe\u0301", "c\u0430f\u00e9"):
        body = {"model": "tiny", "prompt": "salt: " + PROMPT, "max_tokens": 2, "cache_salt": salt}
        async with system.http() as http:
            reply = await http.post("/v1/completions", json=body, headers=system.as_(ATTACKER))
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached:
            return f"{cached} cached tokens"
    return "0 cached tokens"


@attack("names without end: models, salts, request ids, paths", answer="no new series of metrics", counted="")
async def many_names(system: AttackedSystem) -> str:
    async def once(number: int) -> None:
        await complete(system, cache_salt=f"salt-{number}", prompt_cache_key=f"key-{number}")
        await complete(system, model=f"model-{number}")
        await post(system, BODY, path=f"/path-{number}")

    await once(0)
    before = set(system.counts())
    for number in range(1, 8):
        await once(number)
    return f"{len(set(system.counts()) - before) or 'no'} new series of metrics"


@attack("an error that says again what was sent: a model's name of 1 MB", answer="404, in less than 4 KB", counted="")
async def long_error(system: AttackedSystem) -> str:
    async with system.http() as http:
        body = {"model": "m" * (1 << 20), "prompt": "x"}
        reply = await http.post("/v1/completions", json=body, headers=system.as_(ATTACKER))
    return f"{reply.status_code}, in less than 4 KB" if len(reply.content) < 4_096 else f"{len(reply.content)} bytes"


@attack("numbers that are none: -1, 1e400, true, an object", answer="400", counted=refused("invalid"))
async def odd_numbers(system: AttackedSystem) -> str:
    odd = ("-1", "1e400", "true", "{}", '"5"', "-9223372036854775809")
    bodies = [b'{"model":"tiny","prompt":"x","max_tokens":%s}' % number.encode() for number in odd]
    return " ".join({await post(system, body) for body in bodies})


@attack(
    "a worker's name that is none, to choose where it is computed",
    answer="INVALID_ARGUMENT",
    counted='headrace_client_requests_total{outcome="invalid"}',
)
async def odd_worker(system: AttackedSystem) -> str:
    request = inference_pb2.GenerateRequest(model="tiny", text="x")
    request.cache.decode_worker = "d0\x00../../x"
    return await generate(system, request)


async def same_words(system: AttackedSystem, ask, request) -> str:
    """Whether the attacker is told of the victim's request what it is told of none."""
    told = []
    for name in (await request_id_of(system, VICTIM), "0" * 24):
        try:
            return f"told: {await ask(request(request_id=name), metadata=metadata(system, ATTACKER))}"
        except grpc.aio.AioRpcError as failed:
            told.append(f"{failed.code()} {failed.details()}".replace(name, "ID"))
    return "the same words as for no request" if told[0] == told[1] else " / ".join(told)


if __name__ == "__main__":
    print(attacks.table(), end="")
