"""The roofline's arithmetic, against figures worked out by hand."""

from dataclasses import replace

from headrace.core.layer_windows import LayerWindows
from headrace.core.model_work import MachineLimits, ModelWork

# 1,000 weights in blocks, 200 in the output layer, 2 bytes each; two layers, in each attention 5 wide and 4 bytes of KV
# a token: 10 wide and 8 bytes in all.
WORK = ModelWork(
    layer_weights=1_000,
    output_weights=200,
    weight_bytes=2,
    layer_attention_width=5,
    layer_kv_bytes=4,
    windows=LayerWindows((None, None)),
)
LIMITS = MachineLimits(flops_per_s=10_000.0, bytes_per_s=1_000.0)


def test_a_decode_step_reads_the_weights_once_and_each_sequences_kv_once():
    step = WORK.decode_step(3, 99)
    assert step.num_bytes == 2 * 1_200 + 3 * 100 * 8
    assert step.flops == 3 * (2 * 1_200 + 4 * 10 * 100)


def test_prefill_multiplies_the_output_layer_once_and_each_pair_of_tokens_once():
    work = WORK.prefill(4, context_tokens=10)
    pairs = 11 + 12 + 13 + 14  # what each of the four tokens may see
    assert work.flops == 2 * (4 * 1_000 + 200) + 4 * 10 * pairs
    assert work.num_bytes == 2 * 1_200 + 14 * 8


def test_the_least_time_is_the_longer_of_reading_and_multiplying():
    reading, multiplying = WORK.decode_step(1, 0), WORK.prefill(100)
    assert reading.is_bandwidth_bound(LIMITS)
    assert reading.least_seconds(LIMITS) == reading.num_bytes / 1_000
    assert not multiplying.is_bandwidth_bound(LIMITS)
    assert multiplying.least_seconds(LIMITS) == multiplying.flops / 10_000


def test_at_the_batch_where_arithmetic_takes_over_both_take_equally_long():
    batch = WORK.compute_bound_batch(0, LIMITS)
    assert batch is not None
    below, above = WORK.decode_step(int(batch), 0), WORK.decode_step(int(batch) + 1, 0)
    assert below.is_bandwidth_bound(LIMITS)
    assert not above.is_bandwidth_bound(LIMITS)


def test_no_batch_is_limited_by_arithmetic_when_kv_takes_longer_to_read_than_to_use():
    """8 bytes of KV at 1,000 bytes/s are 8 ms; 40 operations on them at 10,000 a second would be 4 ms."""
    assert WORK.compute_bound_batch(1_000_000, LIMITS) is None
    assert WORK.decode_step(1_000_000, 1_000_000).is_bandwidth_bound(LIMITS)


def test_kv_passes_the_weights_where_both_are_as_many_bytes():
    assert WORK.kv_passes_weights_tokens() * 8 == WORK.step_bytes
    assert WORK.kv_passes_weights_tokens(3) * 3 * 8 == WORK.step_bytes


def test_a_layer_with_a_window_reads_and_multiplies_no_more_than_that():
    """One of the two layers sees 16 tokens: of 100 keys both together read 116, and of 10 twenty."""
    mixed = replace(WORK, windows=LayerWindows((16, None)))
    assert mixed.decode_step(3, 99).num_bytes == 2 * 1_200 + 3 * 116 * 4
    assert mixed.decode_step(3, 99).flops == 3 * (2 * 1_200 + 4 * 5 * 116)
    assert mixed.decode_step(1, 9) == WORK.decode_step(1, 9)
    # Positions 14 to 18 see 15 to 19 keys in the one layer, 15 and then 16 in the other; four keys are seen by none.
    prefill = mixed.prefill(5, context_tokens=14)
    assert prefill.flops == 2 * (5 * 1_000 + 200) + 4 * 5 * ((15 + 16 + 17 + 18 + 19) + (15 + 4 * 16))
    assert prefill.num_bytes == 2 * 1_200 + (19 + 19) * 4
    assert mixed.prefill(5, context_tokens=20).num_bytes == 2 * 1_200 + (25 + 20) * 4


def test_windows_put_off_where_kv_passes_the_weights_or_keep_it_away():
    """2,400 bytes of weights are 600 layer-tokens: 584 of the layer that sees all and 16 of the other; or never."""
    assert replace(WORK, windows=LayerWindows((16, None))).kv_passes_weights_tokens() == 584
    assert replace(WORK, windows=LayerWindows((16, 16))).kv_passes_weights_tokens(18) is None
    assert replace(WORK, windows=LayerWindows((16, 16))).kv_passes_weights_tokens(20) == 15
