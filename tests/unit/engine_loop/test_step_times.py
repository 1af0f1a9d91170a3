"""What an engine learns from its steps, and what it says that its prompts will take."""

import pytest

from headrace.core.learned_costs import PRIOR_PREFILL
from headrace.core.step_costs import DecodeCost, PrefillCost
from headrace.engine.schedule_step import PlannedRows
from headrace.engine.step_times import StepTimes

PREFILL = PrefillCost(base_s=0.02, tokens_per_s=1_000.0, attention_s=1e-7)
DECODE = DecodeCost(base_s=0.02, sequence_s=0.005, kv_token_s=1e-6)


def rows(*spans: tuple[int, int]) -> list[PlannedRows]:
    return [PlannedRows(key, start, stop, 0, num_logits=1) for key, (start, stop) in enumerate(spans)]


def test_a_mixed_step_teaches_what_a_prompt_costs_without_the_sequences_beside_it():
    """Fails when decoding beside a prompt makes the prompt look slow, or the prompt makes decoding look slow."""
    times = StepTimes(chunk_tokens=512)
    for kv_tokens in range(100, 4_100, 100):
        times.add(rows((kv_tokens - 1, kv_tokens), (50, 51)), DECODE.step_seconds(2, kv_tokens + 51))
    for chunk in (64, 128, 256, 512) * 10:
        seconds = float(PREFILL.seconds(0, chunk)) + DECODE.sequence_s * 2 + DECODE.kv_token_s * 2_000
        times.add(rows((999, 1_000), (999, 1_000), (0, chunk)), seconds)
    ahead = times.read()
    assert float(ahead.prefill.seconds(0, 512)) == pytest.approx(float(PREFILL.seconds(0, 512)), rel=0.05)
    assert ahead.decode.step_seconds(2, 2_000) == pytest.approx(DECODE.step_seconds(2, 2_000), rel=0.05)


def test_decode_steps_alone_teach_nothing_about_prompts():
    """Fails when a step without a prompt changes what prompts are said to take."""
    times = StepTimes(chunk_tokens=512)
    for _ in range(50):
        times.add(rows((99, 100)), 0.5)
    assert times.read().prefill == PRIOR_PREFILL
