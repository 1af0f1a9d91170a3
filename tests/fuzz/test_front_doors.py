"""Any bytes on the wire to the front doors and to a store node: real servers, which refuse or answer, and serve on."""

import json

import grpc
from attacked_system import ATTACKER, OPERATOR
from fuzzing import fuzz, messages, mutated
from hypothesis import strategies as st

from headrace.wire.v1 import admin_pb2, block_store_pb2, inference_pb2

BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()
STREAM = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
KEY = b"{KEY}"  # is put in when an example is sent: keys are drawn anew in each run
AUTH = b"host: x\r\nauthorization: Bearer " + KEY + b"\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
SEEDS = (
    b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY),
    b"POST /v1/chat/completions HTTP/1.1\r\n" + AUTH + b"content-length: %d\r\n\r\n%s" % (len(STREAM), STREAM),
    b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS + b"x: y\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\n"
    + AUTH
    + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n\r\n"
    + CHUNKS
    + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{}",
    b"GET /v1/models HTTP/1.1\r\n"
    + AUTH
    + b"x-request-id: a\r\ntraceparent: 00-"
    + b"a" * 32
    + b"-"
    + b"b" * 16
    + b"-01\r\n\r\n",
    b"GET /v1/models/a%2f..%00%ff?x=y HTTP/1.1\r\n" + AUTH + b"cookie: a=b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n\r\n",
    b"GET http://other/ready HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"CONNECT other:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
NAMES = st.sampled_from(
    [b"authorization", b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect", b"host",
     b"x-request-id", b"traceparent", b"tracestate", b"content-type", b"content-encoding", b"te",
     b"trailer"]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from([b"Bearer " + KEY, b"chunked", b"identity, chunked", b"2", b"-1", b"0x2", b"99999999999999999999"]),
    st.sampled_from([b"close", b"keep-alive, upgrade", b"websocket", b"100-continue", b"gzip", b"\xff\xfe", b""]),
    st.binary(max_size=20),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request whose parts are each as they should be, or not."""
    line = draw(
        st.sampled_from([b"GET /v1/models", b"POST /v1/completions", b"POST /v1/chat/completions", b"PUT /health"])
    )
    headers = [AUTH] if draw(st.booleans()) else []
    headers += [name + b": " + value + b"\r\n" for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))]
    body = draw(st.sampled_from([b"", BODY, STREAM, CHUNKS + b"\r\n"]))
    if draw(st.booleans()):
        headers.append(b"content-length: %d\r\n" % len(body))
    return line + draw(st.sampled_from([b" HTTP/1.1", b" HTTP/1.0"])) + b"\r\n" + b"".join(headers) + b"\r\n" + body


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """Up to four requests behind each other, and where they are cut into pieces."""
    data = b"".join(draw(st.lists(st.one_of(mutated(*SEEDS), requests()), min_size=1, max_size=4)))
    return data, sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))


def test_any_bytes_to_the_http_port_are_answered_or_refused(fuzzed):
    """Fails when an answer is none, or 500; when anything stays behind; and when the next caller is not served."""
    key = fuzzed.system.keys[ATTACKER].encode()

    def check(conversation):
        data, cuts = conversation[0].replace(KEY, key), conversation[1]
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        fuzzed.run(fuzzed.exchange(pieces))
        fuzzed.run(fuzzed.serves())

    fuzz(conversations(), check)


# Whatever is asked of them, these are no ends of a call that a caller can bring about.
FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
ODD = st.one_of(
    st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=40), st.just("x" * 4_000)
)
METADATA = st.lists(
    st.tuples(st.sampled_from(["traceparent", "headrace-request-id", "x-request-id", "tenant", "grpc-timeout-x"]), ODD),
    max_size=4,
)


def every_method(*services):
    return [
        (f"/{service.full_name}/{method.name}", method)
        for service in services
        for method in service.methods
        if not method.client_streaming
    ]


async def call(channel, path, method, data, metadata):
    """One call to its end, of which only a little is read."""
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    calling = make(path)(data, metadata=metadata, timeout=60)
    try:
        if not method.server_streaming:
            await calling
            return
        read = 0
        async for _ in calling:
            read += 1
            if read == 8:
                calling.cancel()
                return
    except grpc.aio.AioRpcError as ended:
        if ended.code() in FAULTS:
            raise


@st.composite
def calls(draw: st.DrawFn, methods):
    """A method, the bytes of its request or of anything, and metadata."""
    path, method = draw(st.sampled_from(methods))
    whole = draw(messages(method.input_type._concrete_class)).SerializeToString()
    return path, method, draw(st.one_of(st.just(whole), mutated(whole))), draw(METADATA)


GATEWAY = every_method(
    inference_pb2.DESCRIPTOR.services_by_name["Inference"], admin_pb2.DESCRIPTOR.services_by_name["CacheAdmin"]
)
NODE = every_method(
    block_store_pb2.DESCRIPTOR.services_by_name["BlockStore"], admin_pb2.DESCRIPTOR.services_by_name["NodeAdmin"]
)


def test_any_call_of_the_gateways_grpc_api_is_answered_or_refused(fuzzed):
    """Also an operator's, which may do more. Fails when one ends as a fault of the server, or leaves anything."""

    def check(given):
        (path, method, data, metadata), who = given
        own = [("authorization", fuzzed.system.as_(who)["authorization"])]
        fuzzed.run(call(fuzzed.system.grpc_channel, path, method, data, [*own, *metadata]))
        fuzzed.run(fuzzed.serves())

    fuzz(st.tuples(calls(GATEWAY), st.sampled_from([ATTACKER, OPERATOR])), check)


def test_any_call_of_a_store_node_is_answered_or_refused(fuzzed):
    """As a worker that was taken over could make it. Fails when the node's books do not add up afterwards."""

    def check(given):
        path, method, data, metadata = given
        fuzzed.run(call(fuzzed.system.store_channel, path, method, data, metadata))
        fuzzed.system.store.node.check_integrity()

    fuzz(calls(NODE), check)
    fuzzed.run(fuzzed.serves())
