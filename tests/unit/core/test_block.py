"""Block identity: chains, namespaces, and that neither depends on the process."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import (
    PART_CHECK_BYTES,
    HashAlgorithm,
    KvCodec,
    KvLayout,
    Namespace,
    NamespaceId,
    hash_block,
    hash_prompt,
    root_hash,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "block_hashes.json"
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def make_namespace(**changes: object) -> Namespace:
    layout = KvLayout(dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4)
    namespace = Namespace(
        model_id="tiny",
        weights_digest="w",
        tokenizer_digest="t",
        adapter_digest="",
        layout=layout,
        position_digest="p",
        numerics_probe="n",
        hash_algorithm=HashAlgorithm.XXH3_128,
        trust_group="default",
    )
    return replace(namespace, **changes)  # type: ignore[arg-type]


def chain_of(tokens: list[int], namespace: NamespaceId | None = None, algorithm=HashAlgorithm.XXH3_128):
    return hash_prompt(namespace or make_namespace().id, tokens, block_tokens=4, algorithm=algorithm).chain


@given(TOKENS, TOKENS, st.sampled_from(HashAlgorithm))
def test_chain_of_a_longer_prompt_extends_the_chain_of_its_prefix(head, tail, algorithm):
    """Fails if a block's hash depended on anything after it."""
    whole, prefix = chain_of(head + tail, algorithm=algorithm), chain_of(head, algorithm=algorithm)
    assert whole[: len(prefix)] == prefix


@given(TOKENS, TOKENS)
def test_equal_chains_mean_equal_full_blocks(left, right):
    """Fails if the token encoding were ambiguous or a parent were left out."""
    full_left, full_right = left[: len(left) // 4 * 4], right[: len(right) // 4 * 4]
    assert (chain_of(left) == chain_of(right)) == (full_left == full_right)


@given(TOKENS, st.sampled_from(HashAlgorithm))
def test_hashing_block_by_block_gives_the_same_chain(tokens, algorithm):
    """Fails if a growing sequence would be named differently from a prompt."""
    namespace = make_namespace().id
    prompt = hash_prompt(namespace, tokens, block_tokens=4, algorithm=algorithm)
    for index, expected in enumerate(prompt.chain):
        assert hash_block(namespace, prompt.parent_of(index), prompt.block_token_ids(index), algorithm) == expected


def test_same_block_after_another_parent_has_another_hash():
    assert chain_of([1, 2, 3, 4, 9, 9, 9, 9])[1] != chain_of([4, 3, 2, 1, 9, 9, 9, 9])[1]


def test_another_namespace_shares_no_hash():
    tokens = list(range(16))
    assert not set(chain_of(tokens)) & set(chain_of(tokens, make_namespace(trust_group="other").id))


@pytest.mark.parametrize("name", [f.name for f in fields(Namespace) if f.name != "layout"])
def test_every_namespace_field_changes_the_id_and_is_named(name):
    """Fails for any field that were left out of the digest."""
    base = make_namespace()
    changed = replace(base, **{name: 2 if name == "format_version" else "changed"})
    assert changed.id != base.id
    assert base.differing_fields(changed) == [name]


@pytest.mark.parametrize("name", [f.name for f in fields(KvLayout)])
def test_every_layout_field_changes_the_id_and_is_named(name):
    base = make_namespace()
    value = "changed" if isinstance(getattr(base.layout, name), str) else 7
    changed = replace(base, layout=replace(base.layout, **{name: value}))
    assert changed.id != base.id
    assert base.differing_fields(changed) == [f"layout.{name}"]


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_field_boundaries_are_part_of_the_namespace(a, b, c, d):
    """Fails if two fields were joined without a length: ("ab", "c") and ("a", "bc") must differ."""
    left = make_namespace(model_id=a, weights_digest=b)
    right = make_namespace(model_id=c, weights_digest=d)
    assert (left.id == right.id) == ((a, b) == (c, d))


def test_block_bytes_follow_the_formula():
    layout = KvLayout(dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=64)
    assert layout.token_bytes == 2 * 30 * 3 * 64 * 2 == 23_040
    assert layout.block_bytes == 64 * 23_040


def test_coded_blocks_have_a_byte_for_each_number_and_their_scales():
    """Fails if a scale were left out: a block would be cut off, or read beyond its end."""
    raw = KvLayout(dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=32)
    numbers = 2 * 30 * 3 * 32 * 64
    assert replace(raw, codec="int8").block_bytes == numbers + 30 * 3 * (64 + 32) * 2
    for codec in ("fp8", "int8_token", "fp8_token"):
        assert replace(raw, codec=codec).block_bytes == numbers + 2 * 30 * 3 * 32 * 2
        assert replace(raw, codec=codec, dtype="float32").block_bytes == numbers + 2 * 30 * 3 * 32 * 4


def test_the_default_models_blocks_take_at_most_053_of_their_raw_bytes():
    raw = KvLayout(dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=64)
    for codec in KvCodec:
        if codec is not KvCodec.RAW:
            assert replace(raw, codec=codec.value).block_bytes <= 0.53 * raw.block_bytes


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_keys_are_the_same_in_every_process(hash_seed):
    """Fails if anything depended on PYTHONHASHSEED, the process or its environment."""
    program = "import json;from tests_golden import vectors;print(json.dumps(vectors()))"
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert json.loads(printed) == json.loads(GOLDEN.read_text())


def test_root_of_a_chain_is_the_namespace():
    namespace = make_namespace().id
    assert root_hash(namespace) == bytes.fromhex(namespace)


def test_layers_with_a_window_are_named_only_where_they_have_a_part_of_their_own() -> None:
    """Fails if models of one part would lose what is stored of them, or two parts were taken for one."""
    one = KvLayout(dtype="bfloat16", num_layers=6, num_kv_heads=1, head_dim=4, block_tokens=4)
    two = replace(one, near_layers=5)
    assert (two.wide.num_layers, two.near.num_layers) == (1, 5)
    assert one.wide == one
    assert one.wide_bytes == one.block_bytes == two.block_bytes - 2 * PART_CHECK_BYTES
    assert two.wide_bytes == two.wide.block_bytes + PART_CHECK_BYTES
    spaces = [replace(make_namespace(), layout=layout) for layout in (one, two)]
    assert "layout.near_layers" not in dict(spaces[0].named_fields())
    assert spaces[0].differing_fields(spaces[1]) == spaces[1].differing_fields(spaces[0]) == ["layout.near_layers"]
    assert spaces[0].id != spaces[1].id
