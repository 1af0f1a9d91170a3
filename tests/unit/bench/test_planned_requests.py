"""Traces, conversations and texts become prompts: equal ids are equal tokens, lengths fit, seeds decide everything."""

import json
from itertools import islice, pairwise

import pytest

from headrace.bench.generate_load import LoadBounds
from headrace.bench.measure_serving import Workload, plan_workload
from headrace.bench.planned_requests import at_rate, plan_texts, plan_trace, read_texts, shape_prompts
from headrace.client import ServedModel
from headrace.core.errors import InvalidRequest
from headrace.simulate import generate_trace as made
from headrace.simulate.read_trace import Trace, TracedRequest


def make_shape(**changes):
    settings = {
        "block_tokens": 16,
        "prompt_tokens_max": 160,
        "context_tokens_max": 4_096,
        "output_tokens_max": 64,
        "seed": 1,
        "as_words": False,
    }
    return shape_prompts(**{**settings, **changes})


def prompts(requests, **shape):
    return [planned.prompt for planned in plan_trace(requests, make_shape(**shape))]


def shared(first, second):
    """Leading items that two prompts have in common."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


REQUESTS = [
    TracedRequest(160, tuple(range(10)), 0.0, 30),
    TracedRequest(150, (0, 1, 2, 3, 14, 15, 16, 17, 18, 19), 1.0, 30),
    TracedRequest(60, (40, 41, 42), 2.0, 30),
]


def test_prompts_share_exactly_the_blocks_that_their_ids_share():
    """Fails when equal ids give other tokens, or other ids the same."""
    first, second, third = prompts(REQUESTS)
    assert list(map(len, (first, second, third))) == [160, 150, 60]
    assert shared(first, second) == 4 * 16
    assert shared(first, third) == 0


@pytest.mark.parametrize("context", [60, 107, 130])
def test_scaled_prompts_fit_the_context_and_share_in_the_same_proportion(context):
    """Fails when a prompt and its output exceed the context, or scaling moves a block away from its like."""
    planned = list(plan_trace(REQUESTS, make_shape(context_tokens_max=context, output_tokens_max=20)))
    assert all(len(p.prompt) + p.max_tokens <= context for p in planned)
    assert len(planned[0].prompt) == context - 20
    assert shared(planned[0].prompt, planned[1].prompt) == int(4 * 16 * (context - 20) / 160)


def test_a_context_without_room_is_refused_with_the_arithmetic():
    with pytest.raises(InvalidRequest, match="context of 64 tokens has no room"):
        make_shape(context_tokens_max=64, output_tokens_max=64)


def test_the_seed_decides_the_prompts():
    assert prompts(REQUESTS) == prompts(REQUESTS)
    assert shared(prompts(REQUESTS)[0], prompts(REQUESTS, seed=2)[0]) == 0


def test_words_share_as_tokens_do_and_leave_room_for_their_spelling():
    """Fails when chats of one prefix do not begin alike, or would not fit where a word is three tokens."""
    first, second, _ = prompts(REQUESTS, as_words=True)
    assert shared(first.split(), second.split()) >= 64
    assert all(
        len(text) <= 400 for text in prompts(REQUESTS, as_words=True, context_tokens_max=400, output_tokens_max=20)
    )


def test_a_rate_stretches_all_gaps_alike():
    requests = tuple(TracedRequest(16, (number,), at_s, 1) for number, at_s in enumerate((5.0, 6.0, 9.0, 11.0)))
    trace = Trace(requests, 16, 4)
    assert [r.arrival_s for r in at_rate(trace, 1.0, requests_max=None)] == [0.0, 0.5, 2.0, 3.0]
    assert [r.arrival_s for r in at_rate(trace, None, requests_max=3)] == [0.0, 1.0, 4.0]
    with pytest.raises(InvalidRequest, match="no rate"):
        at_rate(Trace((requests[0], requests[0]), 16, 1), 1.0, requests_max=None)


def plan(workload, *, context=4_096, requests=None, duration_s=None):
    model = ServedModel("tiny", context, 16, "ns")
    bounds = LoadBounds(requests_max=requests, duration_s=duration_s, timeout_s=60)
    return list(plan_workload(workload, model, bounds=bounds, as_words=False, report=lambda line: None))


def test_turns_of_a_conversation_repeat_what_was_before_and_carry_its_name():
    """Fails when a turn forgets a part of its conversation: nothing would be left to reuse."""
    planned = plan(Workload(rate=20.0, seed=5), requests=2_000)
    turns = {}
    for request in planned:
        turns.setdefault(request.conversation, []).append(request.prompt)
    assert -1 not in turns
    assert max(map(len, turns.values())) == 4
    followed = [(a, b) for prompts in turns.values() for a, b in pairwise(prompts)]
    assert all(shared(before, after) >= len(before) - 16 for before, after in followed)
    assert len({prompts[0][:256] for prompts in turns.values()}) == 4


@pytest.mark.parametrize("kind", list(made.Workload))
def test_a_short_load_is_as_heavy_as_it_was_asked_to_be(kind):
    """Fails when conversations that have just begun make the first minute lighter than the rate."""
    times = [request.arrival_s for request in plan(Workload(rate=5.0, kind=kind), requests=40)]
    assert (len(times), times[0]) == (40, 0.0)
    assert 39 / times[-1] == pytest.approx(5.0)


def test_what_is_made_up_comes_at_its_rate_until_the_time_is_over():
    """Fails when a load ends before its time, or is not the one that was asked for."""
    times = [request.arrival_s for request in plan(Workload(rate=20.0, seed=5), duration_s=200)]
    assert times == sorted(times)
    assert times[-1] > 200
    settled = [at_s for at_s in times if 40 < at_s <= 200]
    assert len(settled) / 160 == pytest.approx(20, rel=0.15)


def test_the_shape_of_what_is_made_up_can_be_set():
    planned = plan(Workload(kind="shared-prefix", shape=("prefixes=1", "prefix_tokens=640")), requests=20)
    assert len({request.prompt[:640] for request in planned}) == 1
    with pytest.raises(InvalidRequest, match="no workload setting"):
        plan(Workload(shape=("colour=3",)), requests=1)


def test_texts_are_sent_again_and_again(tmp_path):
    plain, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("one\n\ntwo\n")
    objects.write_text(json.dumps({"prompt": "a\nb"}) + "\n")
    sent = list(islice(plan_texts(read_texts(plain), rate=2.0, max_tokens=5, seed=0), 5))
    assert [p.prompt for p in sent] == ["one", "two", "one", "two", "one"]
    assert read_texts(objects) == ["a\nb"]
    objects.write_text("[1]\n")
    with pytest.raises(InvalidRequest, match="not a file of prompts"):
        read_texts(objects)
