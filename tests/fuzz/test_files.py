"""Every file that is read: settings, tenants, traces, exports, and what a node finds in memory and on disk."""

import contextlib
import gzip
import json
import struct
import tempfile
from pathlib import Path

import pytest
import xxhash
import yaml
from fuzzing import fuzz, mutated, objects
from hypothesis import strategies as st
from store_kit import make_header, make_prompt, payload_of

from headrace.admin.export_file import MAGIC, check_export, read_export
from headrace.admin.warm_command import read_prompts
from headrace.bench.planned_requests import read_texts
from headrace.blocks.block_codec import encode_header
from headrace.blocks.disk_tier import open_disk
from headrace.blocks.host_arena import UNIT_BYTES, budgets_path, open_arena
from headrace.config import ModelSettings, load_config
from headrace.core.block import payload_digest
from headrace.core.clock import SystemClock
from headrace.core.errors import BlockCorrupt, ConfigInvalid, HeadraceError, InvalidRequest, ModelRefused
from headrace.core.tenants import HashedKey, new_key
from headrace.engine.check_model import check_model
from headrace.engine.model_digests import read_check, write_check
from headrace.gateway.read_tenants import read_tenants
from headrace.simulate.cluster_model import PROFILES, read_cluster, write_cluster
from headrace.simulate.model_shape import read_model
from headrace.simulate.read_trace import read_trace
from headrace.store.budgets_file import BudgetsFile
from headrace.store.recover_arena import recover_arena
from headrace.store.recover_disk import recover_disk
from headrace.store.store_node import StoreNode

CONFIG = b"model: x\nblock_tokens: 64\nexact: true\nfree_share: 0.01\nredis_url: redis://h\n# a\nstore_codec: int8\n"
LINE = HashedKey.of(new_key()).spell()
TENANTS = f"tenants:\n- name: a\n  keys: ['{LINE}']\n  ttl: 1h\n  quota_mb: 5\n  requests_per_minute: 5\n".encode()
ODD_YAML = (b"&a [*a, *a]", b"? {a: b}\n: c\n", b"!!python/object/apply:os.system ['true']")
DEEP_YAML = b"{" * 400
TRACES = (
    b'{"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [1, 2]}\n' * 2,
    b'{"block_size": 16, "requests": [{"t": 0, "in": 20, "out": 5, "hash_runs": [[1, 2]]}]}\n',
    b'{"input": "hello", "output": "world"}\n',
    b'{"requests": [{"t": 0, "in": 20, "requests": [{"t": 1, "in": 2, "out": 1, "hash_runs": [[1, 9]]}]}]}\n',
)
HUGE_TRACE = b'{"requests": [{"t": 0, "in": 1, "hash_runs": [[1, 999999999999]]}]}\n'


@pytest.fixture
def file():
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "file"


def written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


def test_any_file_is_settings_or_refused(file):
    fuzz(
        mutated(CONFIG, *ODD_YAML),
        lambda data: load_config({}, environ={}, config_file=written(file, data)),
        refuses=(ConfigInvalid,),
    )
    with pytest.raises(ConfigInvalid):
        load_config({}, environ={}, config_file=written(file, DEEP_YAML))


def test_any_environment_is_settings_or_refused():
    names = st.sampled_from(["HEADRACE_BLOCK_TOKENS", "HEADRACE_EXACT", "HEADRACE_FREE_SHARE", "HEADRACE_NODE_ID"])
    values = st.one_of(st.text(max_size=10), st.sampled_from(["nan", "inf", "1e400", "9" * 5_000, "-1", "\x00"]))
    fuzz(st.dictionaries(names, values), lambda named: load_config({}, environ=named), refuses=(ConfigInvalid,))


def test_any_file_is_tenants_or_refused_and_no_key_is_quoted(file):
    key = "hr-canary-" + "x" * 30

    def told_of(data):
        try:
            read_tenants(written(file, data))
        except ConfigInvalid as refused:
            return str(refused)
        return ""

    def check(data):
        assert key not in told_of(data)

    in_clear = TENANTS.replace(LINE.encode(), key.encode())
    fuzz(mutated(TENANTS, in_clear, *ODD_YAML), check)
    check(DEEP_YAML)


def test_any_rows_are_tenants_or_refused(file):
    row = objects(
        name=st.sampled_from(["a", "b", "../x"]),
        keys=st.lists(st.just(LINE), max_size=2),
        role=st.sampled_from(["user", "admin"]),
        trust_group=st.sampled_from(["g", ""]),
        ttl=st.sampled_from(["1h", "0s", "1"]),
        quota_mb=st.integers(-1, 2**50),
        protected_mb=st.integers(-1, 5),
        priority_max=st.integers(-5, 5),
        concurrent_max=st.integers(-1, 2**40),
    )
    rows = st.fixed_dictionaries({"tenants": st.lists(row, max_size=3)})
    fuzz(rows, lambda data: read_tenants(written(file, json.dumps(data).encode())), refuses=(ConfigInvalid,))
    assert yaml.safe_load("a: 1") == {"a": 1}


def test_any_file_is_a_trace_or_refused(file):
    def check(data):
        read_trace(written(file, data), report=lambda line: None)

    fuzz(mutated(*TRACES, HUGE_TRACE), check, refuses=(InvalidRequest,))
    with pytest.raises(InvalidRequest, match="blocks"):
        check(HUGE_TRACE)
    packed = file.with_suffix(".gz")
    fuzz(
        mutated(*map(gzip.compress, TRACES)),
        lambda data: read_trace(written(packed, data), report=lambda line: None),
        refuses=(InvalidRequest,),
    )
    table = file.with_suffix(".csv")
    fuzz(
        mutated(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"),
        lambda data: read_trace(written(table, data), report=lambda line: None),
        refuses=(InvalidRequest,),
    )


PROMPTS = b'plain text\n{"text": "x"}\n{"token_ids": [1, 2]}\n[{"role": "user", "content": "x"}]\n{"prompt": "x"}\n'
DEEP_JSON = b'{"prompt": ' + b"[" * 100_000


def test_any_file_is_prompts_or_refused(file):
    lines = file.with_suffix(".jsonl")
    fuzz(mutated(PROMPTS, DEEP_JSON), lambda data: read_texts(written(lines, data)), refuses=(InvalidRequest,))
    fuzz(
        mutated(PROMPTS, DEEP_JSON),
        lambda data: list(read_prompts(data.decode(errors="replace"), name="x")),
        refuses=(InvalidRequest,),
    )


def test_any_file_is_a_cluster_for_the_simulator_or_refused(file):
    write_cluster(read_cluster(PROFILES[0]), file, remarks=())
    seed = file.read_bytes()
    fuzz(
        mutated(seed, *ODD_YAML, DEEP_YAML, b"name: 2023-13-45 25:61:61\n"),
        lambda data: read_cluster(str(written(file, data))),
        refuses=(InvalidRequest,),
    )


def test_any_file_is_a_models_configuration_or_refused(file):
    directory = file.parent
    config = objects(
        model_type=st.sampled_from(["llama", "qwen3", "x"]),
        num_attention_heads=st.integers(0, 4),
        num_hidden_layers=st.integers(0, 4),
        hidden_size=st.integers(0, 64),
        intermediate_size=st.integers(0, 64),
        vocab_size=st.integers(0, 300),
        text_config=st.just({}),
    )
    spelled = st.one_of(config.map(lambda value: json.dumps(value).encode()), mutated(b'{"hidden_size": 8}', DEEP_JSON))
    settings = ModelSettings(model=str(directory))

    def check(data):
        written(directory / "config.json", data)
        for read in (lambda: read_model(directory), lambda: check_model(settings)):
            with contextlib.suppress(InvalidRequest, ModelRefused):
                read()

    fuzz(spelled, check)


def test_any_file_in_the_cache_of_checks_is_one_or_left_out(file):
    key = {"what": "x"}
    write_check(file.parent, key, {"digest": "y"})
    (kept,) = [path for path in file.parent.rglob("*") if path.is_file()]
    seed = kept.read_bytes()
    fuzz(mutated(seed, DEEP_JSON), lambda data: (written(kept, data), read_check(file.parent, key)))


def export_of(records: bytes) -> bytes:
    """With the checksum that whoever forges a file makes right."""
    return records + xxhash.xxh3_64(records).digest()


def test_any_file_is_an_export_or_refused(file):
    head = json.dumps({"model": "m", "namespace_fields": {"a": "b"}}).encode()
    header, payload = encode_header(make_header(make_prompt(1, 1), 0)), bytes(64)
    whole = MAGIC + struct.pack("<BII", 0, len(head), 0) + head
    whole += struct.pack("<BII", 1, len(header), len(payload)) + header + payload + struct.pack("<BII", 2, 1, 0)
    nested = b"[" * 100_000
    deep = MAGIC + struct.pack("<BII", 0, len(nested), 0) + nested + struct.pack("<BII", 2, 0, 0)

    def check(records):
        path = written(file, export_of(records))
        list(read_export(path, check_export(path)))

    fuzz(mutated(whole, deep), check, refuses=(InvalidRequest,))
    fuzz(mutated(export_of(whole)), lambda data: check_export(written(file, data)), refuses=(InvalidRequest,))


def test_any_budgets_file_is_read_or_left_out(file):
    row = {"account": "a", "namespaces": ["0" * 32], "bytes_max": 5, "bytes_min": 1, "set_unix_ms": 1, "set_by": "x"}
    seed = json.dumps({"version": 1, "budgets": [row]}).encode()
    fuzz(mutated(seed, b"[" * 100_000), lambda data: (budgets_path(file).write_bytes(data), BudgetsFile(file).read()))


def test_an_arena_of_any_bytes_gives_whole_blocks_or_none(file):
    """What is found again is right to the last byte, whatever happened to the rest, and the node serves."""
    total, prompt = 32 * UNIT_BYTES, make_prompt(1, 3)
    arena = open_arena(file, total)
    node = StoreNode(arena, node_id="n", clock=SystemClock(), recovered=recover_arena(arena))
    for outcome in node.reserve([make_header(prompt, position) for position in range(3)]):
        outcome.buffer[:] = payload_of(outcome.header)
        node.commit(outcome.reservation_id, payload_digest(outcome.buffer))
    arena.close()
    seed = file.read_bytes()
    at = st.one_of(st.integers(0, 2_000), st.integers(0, total - 1))
    changes = st.lists(st.tuples(at, st.binary(min_size=1, max_size=16)), max_size=6)

    def check(changed):
        """How many blocks are found."""
        data = bytearray(seed)
        for start, some in changed:
            data[start : start + len(some)] = some
        written(file, bytes(data[:total]))
        again = open_arena(file, total)
        try:
            found = recover_arena(again)
            for block in found.blocks:
                payload = again.payload(block.slot, block.header.payload_bytes)
                assert payload_digest(payload) == block.header.payload_xxh3
                payload.release()
            StoreNode(again, node_id="n", clock=SystemClock(), recovered=found).check_integrity()
            return len(found.blocks)
        finally:
            again.close()

    assert check([]) == 3
    fuzz(changes, check, refuses=(HeadraceError,))


def test_a_disk_of_any_bytes_gives_whole_blocks_or_none(file):
    prompt = make_prompt(1, 3)
    tier = open_disk(file, 1 << 20, segments=4)
    for position in range(3):
        header = make_header(prompt, position)
        payload = payload_of(header)
        spelled = encode_header(header)
        tier.write(tier.place(len(spelled), len(payload)), spelled, payload)
    tier.close()
    (segment,) = [path for path in file.iterdir() if path.name != "lock"]
    seed = segment.read_bytes()

    def check(data):
        segment.write_bytes(data)
        again = open_disk(file, 1 << 20, segments=4)
        try:
            found = recover_disk(again).found
            for record, header in found:
                try:
                    spelled, payload = again.read(record)
                except BlockCorrupt:
                    continue
                assert spelled == encode_header(header)
                assert len(payload) == header.payload_bytes
            return len(found)
        finally:
            again.close()

    assert check(seed) == 3
    fuzz(mutated(seed), check, refuses=(ConfigInvalid,))
