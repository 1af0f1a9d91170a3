"""Everything that a stranger, a worker or a Redis can send: only typed errors come of it."""

import json
from dataclasses import replace

import grpc
import msgpack
import pytest
from fuzzing import JSON, NUMBERS, fuzz, messages, mutated, objects
from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from store_kit import make_header, make_prompt
from tiny_gateway import make_worker_record

from headrace.admin.event_commands import event_as_json, event_as_line
from headrace.blocks.block_codec import decode_header, encode_header
from headrace.blocks.decode_headers import decode_headers
from headrace.client.follow_kv_events import JunkBatch, read_batch
from headrace.core.errors import BlockCorrupt, HeadraceError, InvalidRequest, Unauthenticated
from headrace.core.tenants import HashedKey, KeyRing, Tenant, new_key
from headrace.gateway.authenticate import authenticate
from headrace.index.member_records import JunkRecord, decode_record, encode_record
from headrace.index.redis_keys import block_key_prefix, parse_event, parse_incarnation, parse_key, parse_numbers
from headrace.store.kv_event_format import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventFormat,
    EventHashes,
    EventLayout,
)
from headrace.transfer.serve_blocks import parse_chain
from headrace.wire.openai_body import parse_chat_body, parse_completion_body, parse_json_body
from headrace.wire.openai_reply import render_error
from headrace.wire.parse import parse_admin_prompt, parse_budget, parse_generate_request, parse_selector
from headrace.wire.status import error_of
from headrace.wire.v1 import admin_pb2, block_store_pb2, inference_pb2

PARSERS = {
    inference_pb2.GenerateRequest: parse_generate_request,
    admin_pb2.Selector: parse_selector,
    admin_pb2.WhyMissRequest: parse_admin_prompt,
    admin_pb2.Budget: parse_budget,
}
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    admin_pb2.DESCRIPTOR.services_by_name["CacheAdmin"],
    admin_pb2.DESCRIPTOR.services_by_name["NodeAdmin"],
    block_store_pb2.DESCRIPTOR.services_by_name["BlockStore"],
)
TEXT = st.text(max_size=30)
HEADERS = [encode_header(make_header(make_prompt(1, 2), position)) for position in (0, 1)]
KEY = new_key()
RING = KeyRing(((HashedKey.of(KEY), Tenant("acme", "tenant:acme")),))


@pytest.mark.parametrize("kind", PARSERS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_any_message_is_parsed_or_refused(kind):
    fuzz(messages(kind), PARSERS[kind], refuses=(InvalidRequest,))


@pytest.mark.parametrize("kind", PARSERS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_any_bytes_are_a_message_or_none(kind):
    seed = kind.FromString(b"")
    fuzz(
        mutated(seed.SerializeToString(), b"\x0a\x04tiny\x12\x05hello", b"\x0a\x04tiny\x22\x04\x0a\x02\x01\x02"),
        lambda data: PARSERS[kind](kind.FromString(data)),
        refuses=(InvalidRequest, DecodeError),
    )


CONTENT = st.one_of(TEXT, st.lists(objects(type=st.sampled_from(["text", "image_url"]), text=TEXT), max_size=3))
COMMON = {
    "model": st.just("tiny"),
    "max_tokens": st.integers(0, 50),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "n": st.integers(1, 8),
    "seed": st.integers(0, 2**64),
    "stop": st.one_of(TEXT, st.lists(TEXT, max_size=4)),
    "stream": st.booleans(),
    "stream_options": objects(include_usage=st.booleans()),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 20)),
    "top_logprobs": st.integers(0, 20),
    "cache_salt": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": st.sampled_from(["in_memory", "24h"]),
    "service_tier": st.sampled_from(["flex", "default", "priority"]),
    "user": TEXT,
    "headrace": objects(
        ttl=st.sampled_from(["1h", "5m", "0s"]),
        bypass=st.booleans(),
        priority=st.integers(-4, 4),
        timeout_ms=st.integers(0, 10**7),
        sources=st.lists(TEXT, max_size=2),
        decode_worker=TEXT,
    ),
}
BODIES = {
    parse_completion_body: objects(
        prompt=st.one_of(TEXT, st.lists(TEXT, max_size=3), st.lists(st.integers(0, 300), max_size=4)), **COMMON
    ),
    parse_chat_body: objects(
        messages=st.lists(
            objects(role=st.sampled_from(["user", "system", "assistant", "tool"]), content=CONTENT), max_size=4
        ),
        **COMMON,
    ),
}


@pytest.mark.parametrize("parse", BODIES, ids=lambda parse: parse.__name__)
def test_any_object_is_a_request_or_refused_in_openais_shape(parse):
    def check(body):
        try:
            parse(parse_json_body(json.dumps(body, default=str).encode()))
        except InvalidRequest as refused:
            json.dumps(render_error(refused), allow_nan=False)

    fuzz(BODIES[parse], check)


@pytest.mark.parametrize("parse", BODIES, ids=lambda parse: parse.__name__)
def test_any_bytes_are_a_body_or_refused(parse):
    seed = b'{"model": "tiny", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "n": 1, "stop": ["a"]}'
    deep = b'{"prompt": ' + b'[{"a":' * 100_000
    fuzz(mutated(seed, deep), lambda body: parse(parse_json_body(body)), refuses=(InvalidRequest,))


def test_any_bytes_are_a_blocks_header_or_corrupt():
    """Also: what is accepted is spelled again as it was."""

    def check(data):
        assert encode_header(decode_header(data)) == data
        assert decode_headers([HEADERS[1], data])[1] == decode_header(data)

    fuzz(mutated(*HEADERS), check, refuses=(BlockCorrupt,))


def test_any_bytes_with_a_right_checksum_are_a_blocks_header_or_corrupt():
    """The checksum is no secret: whoever forges a header makes it right."""
    from headrace.blocks.block_codec import seal

    fuzz(
        mutated(*(header[:-8] for header in HEADERS)),
        lambda data: decode_headers([HEADERS[0], seal(data)]),
        refuses=(BlockCorrupt,),
    )


def test_any_bytes_are_a_members_record_or_junk():
    records = (make_worker_record("d0"), replace(make_worker_record("d1"), free_blocks=7))
    fuzz(mutated(*map(encode_record, records)), decode_record, refuses=(JunkRecord,))


def test_whatever_lies_in_redis_is_read_or_left_out():
    key = block_key_prefix("0" * 32) + bytes(16)
    event = [b"holder", b"node:n", b"incarnation", b"1", b"number", b"1", b"op", b"+", b"tier", b"host"]
    event += [b"namespace", b"0" * 32, b"width", b"16", b"blocks", bytes(32)]
    fuzz(mutated(key, b"hr1:{0}:n", b"hr1:{members}:ids"), lambda data: (parse_key(data), parse_incarnation(data)))
    changed = st.lists(st.one_of(st.sampled_from(event), mutated(*event)), max_size=20)
    fuzz(st.one_of(st.just(event), changed), parse_event)
    fuzz(st.lists(mutated(b"0" * 20 + b":node:n", b"7"), max_size=6).filter(lambda p: len(p) % 2 == 0), parse_numbers)


def test_any_chain_is_read_or_refused():
    fuzz(
        st.tuples(st.binary(max_size=200), st.integers(-1, 70)), lambda args: parse_chain(*args), refuses=(ValueError,)
    )


def test_any_authorization_is_known_or_refused():
    known = st.sampled_from([f"Bearer {KEY}", f"bearer  {KEY}", KEY, "Basic x", f"Bearer {KEY}\x00", "Bearer \ud800"])
    fuzz(
        st.one_of(st.none(), st.text(max_size=600), known), lambda a: authenticate(a, RING), refuses=(Unauthenticated,)
    )


def test_any_end_of_a_call_is_an_error_of_ours():
    """What a gateway or a worker answers a client or a gateway."""
    pairs = st.lists(
        st.tuples(
            st.sampled_from(["headrace-error", "headrace-param", "retry-after-ms", "headrace-limit", "x"]),
            st.one_of(st.text(max_size=20), st.binary(max_size=5), st.just("9" * 5_000), st.just("²")),
        ),
        max_size=4,
    )

    def check(end):
        assert isinstance(error_of(*end), HeadraceError)

    words = st.one_of(st.text(max_size=60), st.sampled_from(["worker d0 is unavailable: x", "full; try again in 5 ms"]))
    fuzz(st.tuples(st.sampled_from(list(grpc.StatusCode)), words, pairs), check)


def test_json_of_any_kind_is_an_object_or_refused():
    fuzz(JSON, lambda value: parse_json_body(json.dumps(value, default=str).encode()), refuses=(InvalidRequest,))


def test_every_message_that_comes_from_outside_can_be_made_here():
    """Fails when a service takes a kind of message that the fuzzers cannot build."""
    for service in SERVICES:
        for method in service.methods:
            fuzz_one = messages(method.input_type._concrete_class)
            assert fuzz_one is not None


STORED = BlockStored(tuple(make_header(make_prompt(1, 2), position) for position in (0, 1)))
REMOVED = BlockRemoved(STORED.headers[0].namespace, tuple(header.block_hash for header in STORED.headers))
BATCHES = [
    EventFormat(layout, hashes).encode([AllBlocksCleared(), STORED, REMOVED], unix_s=1.5)
    for layout in EventLayout
    for hashes in EventHashes
]


def test_any_bytes_are_a_batch_of_kv_events_or_junk_and_can_be_shown():
    """Whoever listens at a node's endpoint may be its publisher to a follower: nobody signs. Fails also when a batch
    that was read cannot be printed, or prints what moves a terminal's cursor."""

    def check(data):
        for event in read_batch(7, data):
            assert event_as_line(event).isprintable()
            json.loads(event_as_json(event))

    for batch in BATCHES:
        check(batch)
    nested = b"\x92\x01" + b"\x91" * 100_000
    event = objects(
        type=st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
        block_hashes=st.lists(st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=16)), max_size=3),
        parent_block_hash=st.none(),
        token_ids=st.lists(st.integers(0, 9), max_size=3),
    )
    packed = st.tuples(NUMBERS, st.lists(event, max_size=2)).map(lambda batch: msgpack.packb(in_64_bits(batch)))
    fuzz(st.one_of(mutated(*BATCHES, nested), packed), check, refuses=(JunkBatch,))


def in_64_bits(value):
    """The same, with numbers that msgpack can spell."""
    match value:
        case bool():
            return value
        case int():
            return value % 2**63
        case list() | tuple():
            return [in_64_bits(part) for part in value]
        case dict():
            return {key: in_64_bits(part) for key, part in value.items()}
        case _:
            return value
