"""A plan's numbers, worked out by hand: bytes of KV, room, concurrency, hits at each size, and the cluster."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.core.errors import InvalidRequest
from headrace.core.step_costs import DecodeCost, PrefillCost
from headrace.simulate.model_shape import Machine, ModelShape, device_kv_tokens, estimate_costs, read_model
from headrace.simulate.plan_capacity import Targets, context_row, plan_capacity
from headrace.simulate.read_trace import Trace, TracedRequest
from headrace.simulate.reuse_by_size import found_share

LLAMA_8B = {
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
EIGHT_B = ModelShape(layers=32, kv_heads=8, head_dim=128, query_heads=32, parameters=8e9)
H100 = Machine(
    device_bytes=80e9, host_bytes=100 * 2**30, device_bytes_per_s=3.2e12, flops_per_s=200e12, network_bytes_per_s=25e9
)
RATES = (
    PrefillCost(base_s=0.0, tokens_per_s=4_000.0, attention_s=0.0),
    DecodeCost(base_s=0.010, sequence_s=0.001, kv_token_s=0.0),
)


def make_trace(count: int, *, every_s: float, tokens: int = 4_000, output: int = 10) -> Trace:
    """Requests that share nothing, evenly spaced, too long for a decode worker to compute."""
    chains = (tuple(range(n * 100, n * 100 + tokens // 100)) for n in range(count))
    requests = tuple(TracedRequest(tokens, chain, n * every_s, output) for n, chain in enumerate(chains))
    return Trace(requests, block_tokens=100, num_blocks=count * 100)


def plan(trace: Trace, **targets):
    found = plan_capacity(
        EIGHT_B,
        replace(H100, host_bytes=0),
        trace,
        Targets(**{"ttft_s": 2.0, "itl_s": 0.05, **targets}),
        costs=RATES,
        report=lambda line: None,
    )
    assert all(row.meets == (row.ttft_s_p90 <= targets.get("ttft_s", 2.0)) for row in found.simulated)
    return found


def test_kv_of_a_token_is_two_times_layers_times_heads_times_dim_times_bytes():
    """2 x 32 x 8 x 128 x 2 = 131,072."""
    assert EIGHT_B.kv_token_bytes == 131_072
    assert replace(EIGHT_B, kv_bytes=1).kv_token_bytes == 65_536


def test_a_config_says_shape_and_parameters(tmp_path):
    """2 x 128,256 x 4,096 + 32 x (4,096 x 128 x 80 + 3 x 4,096 x 14,336) = 8.03e9."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for path in (tmp_path, tmp_path / "config.json"):
        model = read_model(path)
        assert (model.layers, model.kv_heads, model.head_dim, model.query_heads) == (32, 8, 128, 32)
        assert model.parameters == pytest.approx(8.03e9, rel=0.001)


def test_a_config_that_lacks_a_field_is_refused_by_its_name(tmp_path):
    for name in LLAMA_8B:
        if name != "num_key_value_heads":  # without it, every query head has its own
            (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LLAMA_8B.items() if k != name}))
            with pytest.raises(InvalidRequest, match=name):
                read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidRequest, match="not a model's config"):
        read_model(tmp_path)


# Qwen3 30B A3B as its config.json has it.
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151_936,
}


def test_experts_are_counted_at_their_own_size(tmp_path):
    assert read(QWEN3_30B, tmp_path).parameters == pytest.approx(30.5e9, rel=0.01)


def test_a_model_that_keeps_something_else_than_kv_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="MLA"):
        read(LLAMA_8B | {"kv_lora_rank": 512}, tmp_path)


def test_room_is_what_weights_and_overhead_leave():
    """80 GB x 0.9 - 16 GB = 56 GB; over 131,072 bytes: 427,246 tokens."""
    assert device_kv_tokens(EIGHT_B, H100) == 427_246
    with pytest.raises(InvalidRequest, match="leave no room for KV in 80 GB; --device-memory-gb"):
        device_kv_tokens(replace(EIGHT_B, parameters=70e9), H100)


def test_seconds_are_estimated_from_operations_and_bytes():
    """200e12 / 16e9 = 12,500 tokens/s; 4 x 32 x 32 x 128 / 200e12 = 2.62 ns; 16e9 / 3.2e12 = 5 ms a step."""
    prefill, decode = estimate_costs(EIGHT_B, H100)
    assert prefill.tokens_per_s == pytest.approx(12_500)
    assert prefill.attention_s == pytest.approx(2.62e-9, rel=0.01)
    assert decode.base_s == pytest.approx(0.005)
    assert decode.kv_token_s == pytest.approx(131_072 / 3.2e12)


def test_concurrency_is_bounded_by_room_and_by_the_target():
    """Room for 10 sequences of 10,000; 50 ms at 10 + 5 ms each are 8."""
    decode = DecodeCost(base_s=0.010, sequence_s=0.001, kv_token_s=4e-7)
    row = context_row(10_000, decode, fit=10, itl_s=0.050)
    assert (row.fit, row.within_itl) == (10, 8)
    assert row.itl_ms == pytest.approx(50.0)
    # 1 sequence takes 10 + 5 ms, 8 take 10 + 40; 32 have no room.
    assert row.itl_ms_at == (pytest.approx(15.0), pytest.approx(50.0), None, None)


def test_int8_counts_its_scales_and_the_store_holds_twice_as_much():
    """65,536 bytes of numbers, and with blocks of 128 tokens 2 bytes for each of 32 x 8 x (128 / 128 + 1) scales."""
    raw, stored, pooled = plan_at_100_gib().codecs
    assert (raw.token_bytes, stored.token_bytes, pooled.token_bytes) == (131_072, 66_560, 66_560)
    assert (raw.host_tokens, stored.host_tokens) == (819_200, 100 * 2**30 // 66_560)
    assert (raw.device_tokens, stored.device_tokens) == (427_246, 427_246)
    assert pooled.device_tokens == int(56e9 // 66_560)
    assert pooled.sequences == pooled.device_tokens // 8_192


def test_half_the_bytes_save_a_worker_where_room_was_what_was_short():
    """Sequences of 6,000 tokens of which a GPU holds 71, twice as many with int8, at an ITL that no batch breaks."""
    raw, stored, pooled = plan_at_100_gib(itl_s=10.0, output=2_000, every_s=0.25).codecs
    assert stored.cluster.decode_workers == raw.cluster.decode_workers
    assert pooled.cluster.decode_workers < raw.cluster.decode_workers
    assert pooled.cluster.meets


def plan_at_100_gib(*, itl_s: float = 0.05, output: int = 10, every_s: float = 0.4):
    trace = make_trace(200, every_s=every_s, output=output)
    trace = replace(trace, requests=tuple(replace(r, block_ids=()) for r in trace.requests), block_tokens=128)
    targets = Targets(ttft_s=4.0, itl_s=itl_s)
    return plan_capacity(EIGHT_B, H100, trace, targets, costs=RATES, report=lambda line: None)


# Gemma 3 1B as its config.json has it: 22 of its 26 layers see 512 tokens.
GEMMA_1B = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1_152,
    "intermediate_size": 6_912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262_144,
}


def read(config: dict, tmp_path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model(tmp_path)


def test_of_layers_with_a_window_a_plan_counts_no_more_than_that(tmp_path):
    """1 KiB for each token and layer. Of 8,192 tokens in blocks of 64 the 4 layers that see all hold all, 32 MiB, the
    others 18 blocks each, 24.75 MiB; a hit moves 8 blocks of theirs, 11 MiB; a step reads 512 keys, as much."""
    model = read(GEMMA_1B, tmp_path)
    assert model.parameters == pytest.approx(1.0e9, rel=0.01)
    mib = model.kv_token_bytes / 2**20
    assert 8_192 * mib == 208
    assert model.held_tokens(8_192, block_tokens=64) * mib == pytest.approx(32 + 24.75)
    assert model.moved_tokens(8_192, block_tokens=64) * mib == pytest.approx(32 + 11)
    assert model.seen_tokens(8_192) * mib == pytest.approx(32 + 11)
    assert replace(model, windows=()).held_tokens(8_192, block_tokens=64) == 8_192
    # Of the pairs in a prompt of 8,192, the layers with a window attend to 512 a token but for the first ones.
    share = (8_192 * 512 - 512 * 511 / 2) / (8_192 * 8_193 / 2)
    assert model.attended_share(8_192) == pytest.approx((4 + 22 * share) / 26)


def test_windows_make_room_for_longer_contexts_and_shorter_steps(tmp_path):
    """The same trace and machine, with the windows and as if there were none. Fails if room, steps or transfers are
    counted for all layers and tokens, or the store keeps less than all of them."""
    mixed = read(GEMMA_1B, tmp_path)
    trace = replace(make_trace(60, every_s=0.4), block_tokens=64)
    trace = replace(trace, requests=tuple(replace(each, block_ids=()) for each in trace.requests))
    machine, targets = replace(H100, device_bytes=12e9, host_bytes=2**30), Targets(ttft_s=4.0, itl_s=0.05)

    def planned(model):
        return plan_capacity(model, machine, trace, targets, report=lambda line: None)

    narrow, full, windowed = (
        planned(mixed),
        planned(replace(mixed, windows=())),
        planned(replace(mixed, windows=(512,) * 26)),
    )
    assert narrow.kv_token_bytes == full.kv_token_bytes
    assert narrow.host_tokens == full.host_tokens
    assert full.windows is None
    assert (narrow.windows.layers, narrow.windows.widest_tokens, narrow.windows.context_tokens) == (22, 512, 4_010)
    for row, all_row, least in zip(narrow.contexts, full.contexts, windowed.contexts, strict=True):
        assert least.fit == windowed.contexts[0].fit > row.fit > all_row.fit
        assert least.itl_ms_at[0] <= row.itl_ms_at[0] < all_row.itl_ms_at[0]
    assert narrow.contexts[-1].fit > 4 * full.contexts[-1].fit
    room = 12e9 * 0.9 - 2 * mixed.parameters
    fit = narrow.contexts[1].fit  # of 8,192 tokens, with the parts of what is published beside them
    assert fit == int((room - 136 * 64 * 22 * 1_024) // ((32 + 24.75) * 2**20))
    assert narrow.windows.moved_share == pytest.approx((4 * 4_032 + 22 * 512) / (26 * 4_032))


def test_hits_at_each_size_are_those_of_a_store_of_that_size():
    """Two prompts of two blocks in turns: a store of four blocks finds all but the first of each, one of two none."""
    turns = [TracedRequest(201, (0, 1) if n % 2 else (2, 3), float(n)) for n in range(10)]
    trace = Trace(tuple(turns), block_tokens=100, num_blocks=4)
    assert found_share(trace, 400) == pytest.approx(8 * 200 / 2_010)
    assert found_share(trace, 200) == 0.0


def test_the_fewest_workers_that_meet_the_targets_are_found():
    """A second of prefill comes every 0.4 s: two workers fall behind without end, three keep up."""
    found = plan(make_trace(200, every_s=0.4))
    assert found.chosen is not None
    assert (found.chosen.prefill_workers, found.chosen.decode_workers) == (3, 1)
    assert found.prefill_workers_busy == pytest.approx(2.5, rel=0.02)
    assert found.requests_per_s == pytest.approx(2.5, rel=0.01)


def test_a_tighter_target_is_met_with_more_or_said_to_be_out_of_reach():
    """No number of workers computes a second's prefill in half a second."""
    found = plan(make_trace(60, every_s=0.4), ttft_s=0.5)
    assert found.chosen is None
    assert len(found.simulated) <= 6, "more workers were tried although they do not help"
    with pytest.raises(InvalidRequest, match="no cluster of such workers"):
        plan(make_trace(60, every_s=0.4), itl_s=0.005)


def test_requests_that_all_come_at_once_cannot_be_planned_for():
    with pytest.raises(InvalidRequest, match="different times"):
        plan(make_trace(60, every_s=0.0))


def test_the_command_prints_the_same_plan_as_its_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    args = ["plan", "--model", str(tmp_path), "--requests-per-s", "3", "--requests", "60", "--host-memory-gib", "4"]
    told = CliRunner().invoke(main, [*args, "--json"], catch_exceptions=False)
    found = json.loads(told.stdout)
    assert found["kv_token_bytes"] == 131_072
    assert found["chosen"]["meets"]
    shown = CliRunner().invoke(main, args, catch_exceptions=False).stdout
    assert "2 x 32 layers x 8 kv heads x 128 x 2 bytes = 131,072 bytes" in shown
    assert (
        f"{found['chosen']['prefill_workers']} prefill and {found['chosen']['decode_workers']} decode workers" in shown
    )
    assert "int8 in the store" in shown
    assert "windows" not in shown
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_1B))
    shown = CliRunner().invoke(main, args, catch_exceptions=False).stdout
    assert "windows: 22 of 26 layers read the last 512 tokens" in shown


def test_a_model_that_is_not_given_whole_is_refused_with_what_is_missing():
    refused = CliRunner().invoke(main, ["plan", "--layers", "32", "--requests-per-s", "1"], catch_exceptions=False)
    assert refused.exit_code == 2
    assert "--kv-heads, --head-dim, --query-heads, --parameters-b" in refused.stderr
