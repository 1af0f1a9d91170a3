"""What an attacker tries, one function each, and what must come of it: the answer, and the counter that rises.

Each function does the attack on a running system and returns the answer that it got, spelled as in the table of
docs/security.md, which is made of ATTACKS.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from attacked_system import ATTACKER, BUSY, LEASE_TTL_MS, OPERATOR, PROMPT, VICTIM, AttackedSystem
from store_kit import make_header, make_prompt, payload_of

from headrace.admin.create_certificates import create_certificates
from headrace.blocks.block_codec import encode_header
from headrace.core.block import payload_digest
from headrace.core.errors import ConfigInvalid
from headrace.core.front_door_limits import HTTP_HEAD_BYTES_MAX
from headrace.core.limits import CHAIN_BLOCKS_MAX, GRPC_MESSAGE_BYTES_MAX, REQUEST_BODY_BYTES_MAX, RESERVE_BLOCKS_MAX
from headrace.gateway.read_tenants import read_tenants
from headrace.transfer.channels import bind_server, build_server
from headrace.transfer.serve_blocks import serve_blocks
from headrace.transfer.tls_files import Tls, TlsFiles
from headrace.wire.v1 import admin_pb2, block_store_pb2, block_store_pb2_grpc, inference_pb2

Run = Callable[[AttackedSystem], Awaitable[str]]
STORE = "/headrace.v1.BlockStore/"


@dataclass(frozen=True)
class Attack:
    """One row of the table. `counted` names the counter that rises, or is "" where none is to rise."""

    tried: str
    answer: str
    counted: str
    run: Run


ATTACKS: list[Attack] = []


def attack(tried: str, *, answer: str, counted: str) -> Callable[[Run], Run]:
    """Put a function into the table."""

    def add(run: Run) -> Run:
        ATTACKS.append(Attack(tried, answer, counted, run))
        return run

    return add


def refused(reason: str) -> str:
    return f'headrace_refused_calls_total{{reason="{reason}"}}'


def ended(reason: str) -> str:
    return f'headrace_http_connections_ended{{reason="{reason}"}}'


async def complete(system: AttackedSystem, tenant: str = ATTACKER, **body) -> str:
    """The answer to a completion over HTTP: its status, and the code of an error."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2} | body
    return await post(system, json.dumps(body).encode(), tenant)


async def post(system: AttackedSystem, body: bytes, tenant: str = ATTACKER, path: str = "/v1/completions") -> str:
    headers = {"content-type": "application/json", **system.as_(tenant)}
    async with system.http() as http:
        reply = await http.post(path, content=body, headers=headers)
    return str(reply.status_code)


async def generate(system: AttackedSystem, request: inference_pb2.GenerateRequest, tenant: str = ATTACKER) -> str:
    async def call() -> None:
        async for _ in system.inference.Generate(request, metadata=tuple(system.as_(tenant).items())):
            pass

    return await code_of(call())


async def code_of(call: Awaitable[object]) -> str:
    """How a gRPC call ended."""
    try:
        await call
    except grpc.aio.AioRpcError as failed:
        return failed.code().name
    return "OK"


async def cached_tokens(system: AttackedSystem, tenant: str, prompt: str) -> int:
    async with system.http() as http:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        reply = await http.post("/v1/completions", json=body, headers=system.as_(tenant))
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def metadata(system: AttackedSystem, tenant: str) -> tuple[tuple[str, str], ...]:
    return tuple(system.as_(tenant).items())


@attack("no key, HTTP", answer="401", counted=refused("unauthenticated"))
async def no_key(system: AttackedSystem) -> str:
    async with system.http() as http:
        return str((await http.post("/v1/completions", json={})).status_code)


@attack("a wrong key, gRPC", answer="UNAUTHENTICATED", counted=refused("unauthenticated"))
async def wrong_key(system: AttackedSystem) -> str:
    wrong = (("authorization", "Bearer hr-" + "x" * 43),)
    return await code_of(system.admin.Stat(admin_pb2.StatRequest(), metadata=wrong))


@attack("a key of 1 MB", answer="431", counted=ended("head_bytes"))
async def huge_key(system: AttackedSystem) -> str:
    return await raw(system.url, b"GET /v1/models HTTP/1.1\r\nauthorization: Bearer " + b"x" * (1 << 20) + b"\r\n\r\n")


@attack("a user's key for an operator's call", answer="PERMISSION_DENIED", counted=refused("permission_denied"))
async def users_key(system: AttackedSystem) -> str:
    request = admin_pb2.SetQuotaRequest(tenant=VICTIM, bytes_max=0)
    return await code_of(system.admin.SetQuota(request, metadata=metadata(system, ATTACKER)))


@attack("another tenant's prompt, to see if it is cached", answer="0 cached tokens, as for a new prompt", counted="")
async def others_prefix(system: AttackedSystem) -> str:
    await cached_tokens(system, VICTIM, PROMPT)
    assert await cached_tokens(system, VICTIM, PROMPT) > 0, "without the victim's hit nothing is tried"
    return f"{await cached_tokens(system, ATTACKER, PROMPT)} cached tokens, as for a new prompt"


@attack("why another tenant's prompt misses", answer="the same words as for a new prompt", counted="")
async def others_why_miss(system: AttackedSystem) -> str:
    await cached_tokens(system, VICTIM, PROMPT + "why")

    async def asked(text: str) -> str:
        request = admin_pb2.WhyMissRequest(model="tiny", text=text)
        reply = await system.admin.WhyMiss(request, metadata=metadata(system, ATTACKER))
        return str(reply).replace(text, "")

    known, new = await asked(PROMPT + "why"), await asked(PROMPT[::-1] + "why")
    words = [line.partition(":")[0].strip() for line in known.splitlines()]
    assert words == [line.partition(":")[0].strip() for line in new.splitlines()]
    return "the same words as for a new prompt"


@attack("evicting another tenant's blocks by name", answer="INVALID_ARGUMENT", counted=refused("invalid"))
async def evict_others(system: AttackedSystem) -> str:
    request = admin_pb2.EvictRequest(selector=admin_pb2.Selector(tenant=VICTIM))
    return await code_of(system.admin.Evict(request, metadata=metadata(system, ATTACKER)))


@attack("evicting everything there is", answer="0 blocks of others", counted="")
async def evict_everything(system: AttackedSystem) -> str:
    prompt = make_prompt(77, 1)
    await store_block(system, make_header(prompt, 0))
    held = system.store.node.stat().committed_blocks
    await system.admin.Evict(admin_pb2.EvictRequest(), metadata=metadata(system, ATTACKER))
    return f"{held - system.store.node.stat().committed_blocks} blocks of others"


@attack(
    "more requests than the tenant's rate",
    answer="429",
    counted='headrace_refused_requests_total{reason="requests_per_minute",tenant="busy"}',
)
async def over_the_rate(system: AttackedSystem) -> str:
    return [await complete(system, BUSY) for _ in range(3)][-1]


@attack("a body of twice the limit", answer="413", counted=refused("too_large"))
async def large_body(system: AttackedSystem) -> str:
    return await complete(system, prompt="x" * 2 * REQUEST_BODY_BYTES_MAX)


@attack("headers without end", answer="431", counted=ended("head_bytes"))
async def endless_head(system: AttackedSystem) -> str:
    line = b"x-more: " + b"v" * 1_000 + b"\r\n"
    return await raw(system.url, b"GET /health HTTP/1.1\r\n" + line * (2 * HTTP_HEAD_BYTES_MAX // len(line)))


@attack("headers that do not come", answer="408", counted=ended("head_time"))
async def slow_head(system: AttackedSystem) -> str:
    return await raw(system.impatient_url, b"GET /health HTTP/1.1\r\nx-slow: ")


@attack("a body that does not come", answer="408", counted=ended("body_time"))
async def slow_body(system: AttackedSystem) -> str:
    key = system.keys[ATTACKER].encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\nauthorization: Bearer " + key + b"\r\n\r\n"
    return await raw(system.impatient_url, head + b'{"model"')


@attack("a stream that its client never reads", answer="connection closed, work ended", counted=ended("unread"))
async def never_reads(system: AttackedSystem) -> str:
    # An answer of some megabytes: more than the small buffers of both sides hold.
    body = {"model": "tiny", "prompt": PROMPT, "n": 8, "max_tokens": 200, "stream": True, "logprobs": 5}
    payload = json.dumps(body).encode()
    key = system.keys[ATTACKER].encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\nauthorization: Bearer %s\r\n\r\n"
    request = head % (len(payload), key) + payload
    seen = system.ended.count("unread")
    host, _, port = system.impatient_url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        await asyncio.to_thread(client.connect, (host, int(port)))
        client.sendall(request)
        async with asyncio.timeout(120):
            while system.ended.count("unread") == seen:  # noqa: ASYNC110 - a client that does not read hears nothing
                await asyncio.sleep(0.01)
    await system.at_rest()
    return "connection closed, work ended"


@attack("a gRPC message above the limit", answer="RESOURCE_EXHAUSTED", counted=refused("invalid"))
async def large_message(system: AttackedSystem) -> str:
    request = inference_pb2.GenerateRequest(model="tiny", text="x" * (GRPC_MESSAGE_BYTES_MAX + 1))
    return await generate(system, request)


@attack("bytes that are no message", answer="INVALID_ARGUMENT", counted=refused("invalid"))
async def no_message(system: AttackedSystem) -> str:
    call = system.grpc_channel.unary_unary("/headrace.v1.CacheAdmin/Stat")
    return await code_of(call(b"\xff" * 64, metadata=metadata(system, OPERATOR)))


@attack("a prompt longer than the context", answer="400", counted=refused("context_exceeded"))
async def long_prompt(system: AttackedSystem) -> str:
    return await complete(system, prompt="x" * 100_000)


@attack("an output longer than the context", answer="400", counted=refused("context_exceeded"))
async def long_output(system: AttackedSystem) -> str:
    return await complete(system, max_tokens=300)


@attack("10,000 stop strings", answer="400", counted=refused("invalid"))
async def many_stops(system: AttackedSystem) -> str:
    return await complete(system, stop=[f"s{n}" for n in range(10_000)])


@attack("a stop string of 1 MB", answer="400", counted=refused("invalid"))
async def long_stop(system: AttackedSystem) -> str:
    return await complete(system, stop="s" * (1 << 20))


@attack("logit_bias of 100,000 entries", answer="400", counted=refused("invalid"))
async def many_biases(system: AttackedSystem) -> str:
    return await complete(system, logit_bias={str(n): 1 for n in range(100_000)})


@attack("a million choices", answer="400", counted=refused("invalid"))
async def many_choices(system: AttackedSystem) -> str:
    return await complete(system, n=1_000_000)


@attack("JSON nested 200,000 deep", answer="400", counted=refused("invalid"))
async def deep_json(system: AttackedSystem) -> str:
    return await post(system, b'{"model":"tiny","prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}")


@attack("a number of 100,000 digits", answer="400", counted=refused("invalid"))
async def long_number(system: AttackedSystem) -> str:
    return await post(system, b'{"model":"tiny","prompt":"x","max_tokens":' + b"9" * 100_000 + b"}")


@attack("NaN for a temperature", answer="400", counted=refused("invalid"))
async def not_a_number(system: AttackedSystem) -> str:
    return await post(system, b'{"model":"tiny","prompt":"x","temperature":NaN}')


@attack("token ids that the model does not have", answer="INVALID_ARGUMENT", counted=refused("invalid"))
async def unknown_tokens(system: AttackedSystem) -> str:
    ids = inference_pb2.TokenIds(ids=[4_000_000_000])
    return await generate(system, inference_pb2.GenerateRequest(model="tiny", token_ids=ids))


@attack("a cache_salt of 1 MB", answer="400", counted=refused("invalid"))
async def long_salt(system: AttackedSystem) -> str:
    return await complete(system, cache_salt="s" * (1 << 20))


@attack("a cache_salt with control characters, to leave the group", answer="0 cached tokens", counted="")
async def odd_salt(system: AttackedSystem) -> str:
    await cached_tokens(system, VICTIM, PROMPT)
    async with system.http() as http:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "cache_salt": "\x00tenant:victim\r\n\x1b[2J"}
        reply = await http.post("/v1/completions", json=body, headers=system.as_(ATTACKER))
    return f"{reply.json()['usage']['prompt_tokens_details']['cached_tokens']} cached tokens"


@attack("a priority above the tenant's", answer="400", counted=refused("invalid"))
async def high_priority(system: AttackedSystem) -> str:
    return await complete(system, headrace={"priority": 4})


@attack("a model called ../../../etc/passwd, HTTP", answer="404", counted=refused("unknown_model"))
async def path_as_model(system: AttackedSystem) -> str:
    return await complete(system, model="../../../etc/passwd")


@attack("a model called ../../../etc/passwd, gRPC", answer="NOT_FOUND", counted=refused("unknown_model"))
async def path_as_model_grpc(system: AttackedSystem) -> str:
    return await generate(system, inference_pb2.GenerateRequest(model="../../../etc/passwd", text="x"))


@attack("/v1/models/..%2f..%2fetc%2fpasswd", answer="404", counted=refused("unknown_model"))
async def path_in_url(system: AttackedSystem) -> str:
    key = system.keys[ATTACKER].encode()
    line = b"GET /v1/models/..%2f..%2f..%2fetc%2fpasswd HTTP/1.1\r\nconnection: close\r\nauthorization: Bearer "
    return await raw(system.url, line + key + b"\r\n\r\n")


@attack("draining a node called ../../tmp/x", answer="INVALID_ARGUMENT", counted=refused("invalid"))
async def path_as_node(system: AttackedSystem) -> str:
    async def drain() -> None:
        request = admin_pb2.DrainNodeRequest(holder="node:../../tmp/x")
        async for _ in system.admin.DrainNode(request, metadata=metadata(system, OPERATOR)):
            pass

    return await code_of(drain())


@attack("a tenant called ../../etc in the tenants file", answer="start refused", counted="")
async def path_as_tenant(system: AttackedSystem) -> str:
    path = system.directory / "odd.yaml"
    path.write_text("tenants: [{name: ../../etc, keys: [x]}]")
    try:
        read_tenants(path)
    except ConfigInvalid:
        return "start refused"
    return "read"


@attack("a listing of 2**32 - 1 blocks", answer="at most 10,000 blocks", counted="")
async def huge_listing(system: AttackedSystem) -> str:
    request = admin_pb2.ListBlocksRequest(limit=2**32 - 1)
    reply = await system.admin.ListBlocks(request, metadata=metadata(system, OPERATOR))
    return "at most 10,000 blocks" if len(reply.blocks) <= 10_000 else f"{len(reply.blocks)} blocks"


@attack("a million hashes to evict", answer="RESOURCE_EXHAUSTED", counted=refused("invalid"))
async def many_hashes(system: AttackedSystem) -> str:
    selector = admin_pb2.Selector(block_hashes=[n.to_bytes(32) for n in range(1_000_000)])
    return await code_of(
        system.admin.Evict(admin_pb2.EvictRequest(selector=selector), metadata=metadata(system, ATTACKER))
    )


async def reserve(system: AttackedSystem, *headers) -> list:
    spelled = [encode_header(header) for header in headers]
    return list((await system.block_store.Reserve(block_store_pb2.ReserveRequest(headers=spelled))).outcomes)


async def fill(system: AttackedSystem, reservation_id: str, payload: bytes, digest: int) -> str:
    """How a stream of payload ends at the store node."""
    call = system.store_channel.stream_unary(STORE + "Fill")
    start = block_store_pb2.FillStart(reservation_id=reservation_id, payload_xxh3=digest)

    async def chunks():
        yield start.SerializeToString()
        yield payload

    return await code_of(call(chunks()))


async def store_block(system: AttackedSystem, header) -> None:
    (outcome,) = await reserve(system, header)
    assert await fill(system, outcome.reservation_id, payload_of(header), payload_digest(payload_of(header))) == "OK"


@attack("a forged block: bytes that are not those of the checksum", answer="DATA_LOSS", counted=refused("corrupt"))
async def forged_bytes(system: AttackedSystem) -> str:
    header = make_header(make_prompt(1, 1), 0)
    (outcome,) = await reserve(system, header)
    answer = await fill(system, outcome.reservation_id, bytes(header.payload_bytes), payload_digest(payload_of(header)))
    assert system.store.node.lookup(header.namespace, (header.block_hash,)) == 0, "it must not be readable"
    return answer


@attack("a forged block: a hash that does not follow from its tokens", answer="DATA_LOSS", counted=refused("corrupt"))
async def forged_hash(system: AttackedSystem) -> str:
    header = replace(make_header(make_prompt(2, 1), 0), token_ids=(9, 9, 9, 9))
    return await code_of(reserve(system, header))


@attack("a forged block: a header that was changed", answer="DATA_LOSS", counted=refused("corrupt"))
async def forged_header(system: AttackedSystem) -> str:
    spelled = bytearray(encode_header(make_header(make_prompt(3, 1), 0)))
    spelled[len(spelled) // 2] ^= 1
    request = block_store_pb2.ReserveRequest(headers=[bytes(spelled)])
    return await code_of(system.block_store.Reserve(request))


@attack("a forged block: more bytes than were reserved", answer="DATA_LOSS", counted=refused("corrupt"))
async def long_payload(system: AttackedSystem) -> str:
    header = make_header(make_prompt(4, 1), 0)
    (outcome,) = await reserve(system, header)
    return await fill(system, outcome.reservation_id, payload_of(header) * 2, 0)


@attack("a block's lookup in a namespace that is none", answer="INVALID_ARGUMENT", counted=refused("invalid"))
async def odd_namespace(system: AttackedSystem) -> str:
    request = block_store_pb2.LookupRequest(namespace="../" * 10 + "xy", chain=bytes(16), hash_bytes=16)
    return await code_of(system.block_store.Lookup(request))


@attack("a chain of more blocks than any prompt has", answer="INVALID_ARGUMENT", counted=refused("invalid"))
async def long_chain(system: AttackedSystem) -> str:
    request = block_store_pb2.LookupRequest(namespace="0" * 32, chain=bytes(16 * (CHAIN_BLOCKS_MAX + 1)), hash_bytes=16)
    return await code_of(system.block_store.Lookup(request))


@attack("more reservations than one call may make", answer="INVALID_ARGUMENT", counted=refused("invalid"))
async def many_reservations(system: AttackedSystem) -> str:
    spelled = [encode_header(make_header(make_prompt(5, 1), 0))] * (RESERVE_BLOCKS_MAX + 1)
    return await code_of(system.block_store.Reserve(block_store_pb2.ReserveRequest(headers=spelled)))


async def lease(system: AttackedSystem, token: int) -> str:
    header = make_header(make_prompt(token, 1), 0)
    await store_block(system, header)
    request = block_store_pb2.LeaseRequest(namespace=header.namespace, chain=bytes(header.block_hash), hash_bytes=16)
    reply = await system.block_store.Lease(request)
    assert reply.lease_id
    return reply.lease_id


async def fetch(system: AttackedSystem, lease_id: str) -> str:
    call = system.store_channel.unary_stream(STORE + "Fetch")
    request = block_store_pb2.FetchRequest(lease_id=lease_id).SerializeToString()

    async def read() -> None:
        async for _ in call(request):
            pass

    return await code_of(read())


@attack("a lease replayed after its end", answer="NOT_FOUND", counted=refused("not_held"))
async def replayed_lease(system: AttackedSystem) -> str:
    lease_id = await lease(system, 6)
    async with asyncio.timeout(60):
        while system.store.node.holds_lease(lease_id):  # noqa: ASYNC110 - time alone ends it
            await asyncio.sleep(LEASE_TTL_MS / 1_000)
    return await fetch(system, lease_id)


@attack("a lease that was given back", answer="NOT_FOUND", counted=refused("not_held"))
async def released_lease(system: AttackedSystem) -> str:
    lease_id = await lease(system, 7)
    await system.block_store.Release(block_store_pb2.ReleaseRequest(lease_id=lease_id))
    return await fetch(system, lease_id)


@attack("a guessed lease", answer="NOT_FOUND", counted=refused("not_held"))
async def guessed_lease(system: AttackedSystem) -> str:
    return await fetch(system, "0")


@attack("a guessed reservation, to write over a block", answer="NOT_FOUND", counted=refused("not_held"))
async def guessed_reservation(system: AttackedSystem) -> str:
    return await fill(system, "0", b"x" * 100, 0)


async def lookup_under_tls(system: AttackedSystem, credentials: grpc.ChannelCredentials | None) -> str:
    """A lookup at a store node that speaks mutual TLS."""
    hosts = create_certificates(system.directory / "ours", hosts=["127.0.0.1"], days=1)
    files = TlsFiles(cert_file=hosts.cert_file, key_file=hosts.key_file, ca_file=hosts.ca_file)
    server = build_server()
    serve_blocks(server, system.store.node)
    connected = system.store_metrics.tls_connections.inc
    address = f"127.0.0.1:{bind_server(server, '127.0.0.1:0', tls=Tls(files), connected=connected)}"
    await server.start()
    channel = (
        grpc.aio.insecure_channel(address) if credentials is None else grpc.aio.secure_channel(address, credentials)
    )
    try:
        async with channel:
            request = block_store_pb2.LookupRequest(namespace="0" * 32, chain=bytes(16), hash_bytes=16)
            return await code_of(block_store_pb2_grpc.BlockStoreStub(channel).Lookup(request, timeout=60))
    finally:
        await server.stop(0)


@attack("plain text to a store node under TLS", answer="UNAVAILABLE", counted="headrace_tls_connections_total")
async def plain_text(system: AttackedSystem) -> str:
    return await lookup_under_tls(system, None)


@attack(
    "a certificate of another authority, to a store node under TLS",
    answer="UNAVAILABLE",
    counted="headrace_tls_connections_total",
)
async def other_authority(system: AttackedSystem) -> str:
    ours = create_certificates(system.directory / "ours", hosts=["127.0.0.1"], days=1)
    theirs = create_certificates(system.directory / "theirs", hosts=["127.0.0.1"], days=1)
    files = (theirs.key_file, theirs.cert_file, ours.ca_file)
    key, cert, authority = [await asyncio.to_thread(Path(path).read_bytes) for path in files]
    return await lookup_under_tls(system, grpc.ssl_channel_credentials(authority, key, cert))


@attack(
    "plain text to the HTTPS port",
    answer="connection closed, no answer",
    counted='headrace_refused_connections{reason="plain_text"}',
)
async def plain_text_to_https(system: AttackedSystem) -> str:
    answer = await raw(system.https_url, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    return f"connection closed, {answer or 'no answer'}"


async def raw(url: str, request: bytes) -> str:
    """The status that the server answers these bytes with; "" when it says nothing."""
    host, _, port = url.partition("://")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            words = (await reader.readline()).split()
        return words[1].decode() if len(words) > 1 else ""
    except ConnectionError:  # it may be closed while this is written
        return ""
    finally:
        writer.transport.abort()


def table() -> str:
    """The attacks as docs/security.md has them."""
    lines = ["| attack | answer | counted by |", "|---|---|---|"]
    rows = [(a.tried, a.answer, f"`{a.counted}`" if a.counted else "") for a in ATTACKS]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
