"""Liveness records as bytes: exactly the fields of this version or the one before, or junk."""

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import CacheSource, HashAlgorithm, KvLayout, Namespace
from headrace.core.generation import WorkerId
from headrace.core.index_limits import MEMBER_RECORD_BYTES_MAX
from headrace.core.limits import WORKER_LINKS_MAX
from headrace.core.members import MeasuredLink, StoreNodeRecord, WorkerRecord, WorkerRole
from headrace.index.member_records import RECORD_VERSION, JunkRecord, decode_record, encode_record

NODE = StoreNodeRecord(
    node_id="a", incarnation=1, host="h", address="127.0.0.1:1", arena_path="/dev/shm/a", pid=1, metrics_port=2
)
WORKER = WorkerRecord(
    worker_id=WorkerId("w"),
    incarnation=2**62,
    role=WorkerRole.PREFILL,
    host="h",
    store_node="a",
    model="m",
    namespace=Namespace(
        model_id="m",
        weights_digest="w",
        tokenizer_digest="t",
        adapter_digest="",
        layout=KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=4),
        position_digest="p",
        numerics_probe="",
        hash_algorithm=HashAlgorithm.XXH3_128,
        trust_group="default",
    ),
    context_tokens_max=100,
    pool_blocks=10,
    pid=1,
)


LINK = MeasuredLink(node_id="a", via=CacheSource.GRPC, bytes_per_s=1e9, round_trip_s=0.002)
MEASURED = replace(WORKER, queue_s=1.5, links=(LINK, replace(LINK, via=CacheSource.SHARED_MEMORY)))


ELSEWHERE = replace(WORKER, ray_cluster="blue")


@pytest.mark.parametrize("record", [NODE, WORKER, MEASURED, ELSEWHERE])
def test_a_record_survives_the_round_trip(record):
    decoded = decode_record(encode_record(record))
    assert decoded == record
    assert type(decoded) is type(record)


def test_parts_of_the_version_before_are_known_and_know_whoever_has_nothing_new_to_say():
    """Fails when the store nodes that outlive an upgrade are nobody to the new workers, or the new ones to the old: no
    block is found until the last of them is replaced."""
    for record in (NODE, WORKER):
        before = msgpack.unpackb(encode_record(record))
        assert before["version"] == RECORD_VERSION - 1
        assert "ray_cluster" not in before["record"]
        with_all = {**before["record"], **({"ray_cluster": ""} if record is WORKER else {})}
        now = {**before, "version": RECORD_VERSION, "record": with_all}
        assert decode_record(msgpack.packb(now)) == decode_record(msgpack.packb(before)) == record
    assert msgpack.unpackb(encode_record(ELSEWHERE))["version"] == RECORD_VERSION


def test_enums_come_back_as_enums():
    decoded = decode_record(encode_record(WORKER))
    assert isinstance(decoded, WorkerRecord)
    assert decoded.role is WorkerRole.PREFILL
    assert decoded.namespace.hash_algorithm is HashAlgorithm.XXH3_128


@pytest.mark.parametrize("record", [NODE, WORKER])
def test_every_truncation_is_junk(record):
    data = encode_record(record)
    for length in range(len(data)):
        with pytest.raises(JunkRecord):
            decode_record(data[:length])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_junk_and_never_another_error(data):
    with pytest.raises(JunkRecord):
        decode_record(data)


def test_anything_that_is_not_exactly_this_versions_record_is_junk():
    good = msgpack.unpackb(encode_record(NODE))
    fields = good["record"]
    wrong = [
        {**good, "version": RECORD_VERSION + 1},
        {**good, "version": RECORD_VERSION - 2},
        {**good, "version": "1"},
        {**good, "version": [RECORD_VERSION]},
        {**good, "kind": "router"},
        {**good, "kind": ["store_node"]},
        {**good, "extra": 1},
        {"version": RECORD_VERSION, "kind": "store_node"},
        {**good, "record": None},
        {**good, "record": {**fields, "extra": 1}},
        {**good, "record": {name: fields[name] for name in fields if name != "host"}},
        {**good, "record": {**fields, "incarnation": "1"}},
        {**good, "record": {**fields, "incarnation": True}},
        {**good, "record": {**fields, "host": b"h"}},
        [1, 2, 3],
    ]
    for outer in wrong:
        with pytest.raises(JunkRecord):
            decode_record(msgpack.packb(outer))


def test_a_record_with_fields_of_another_version_is_junk():
    of_now, before = (msgpack.unpackb(encode_record(record)) for record in (ELSEWHERE, WORKER))
    for outer in ({**of_now, "version": RECORD_VERSION - 1}, {**before, "version": RECORD_VERSION}):
        with pytest.raises(JunkRecord):
            decode_record(msgpack.packb(outer))


def test_an_unknown_role_or_a_wrong_layout_is_junk():
    good = msgpack.unpackb(encode_record(WORKER))
    layout = good["record"]["namespace"]["layout"]
    for change in (
        {"role": "poet"},
        {"role": 3},
        {"namespace": {**good["record"]["namespace"], "layout": {**layout, "x": 1}}},
    ):
        with pytest.raises(JunkRecord):
            decode_record(msgpack.packb({**good, "record": {**good["record"], **change}}))


def test_measured_numbers_are_floats_that_mean_something_and_links_are_a_list_of_links():
    """Fails when a worker's NaN, an integer or a nameless link reaches the routing of every gateway."""
    good = msgpack.unpackb(encode_record(MEASURED))
    fields = good["record"]
    link = fields["links"][0]
    for change in (
        {"queue_s": float("nan")},
        {"queue_s": float("inf")},
        {"queue_s": 1},
        {"queue_s": "1.5"},
        {"costs": {**fields["costs"], "decode_base_s": None}},
        {"costs": {name: value for name, value in fields["costs"].items() if name != "decode_base_s"}},
        {"links": link},
        {"links": [link, 3]},
        {"links": [{**link, "via": "pigeon"}]},
        {"links": [{**link, "node_id": 7}]},
    ):
        with pytest.raises(JunkRecord):
            decode_record(msgpack.packb({**good, "record": {**fields, **change}}))


def test_a_record_with_all_the_links_that_it_may_have_fits():
    """Fails when a worker in a large cluster cannot announce itself."""
    far = tuple(
        replace(LINK, node_id=f"node-{number}.rack-12.zone-b.example.org") for number in range(WORKER_LINKS_MAX)
    )
    assert decode_record(encode_record(replace(WORKER, links=far))).links == far


def test_a_huge_record_is_junk_without_being_parsed():
    huge = msgpack.packb({"version": RECORD_VERSION, "kind": "store_node", "record": "x" * MEMBER_RECORD_BYTES_MAX})
    with pytest.raises(JunkRecord):
        decode_record(huge)
