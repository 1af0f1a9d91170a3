"""The roofline's arithmetic, against figures worked out by hand."""

import pytest

from headrace.core.model_work import MachineLimits, ModelWork

# 1,000 weights in blocks, 200 in the output layer, 2 bytes each; attention 10 wide; 8 bytes of KV a token.
WORK = ModelWork(layer_weights=1_000, output_weights=200, weight_bytes=2, attention_width=10, kv_token_bytes=8)
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
    assert WORK.kv_passes_weights_tokens * 8 == pytest.approx(WORK.step_bytes)
