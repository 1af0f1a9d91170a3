"""From a client's request to tokens, over workers that die, refuse, hang and are slow."""

import asyncio
import re
from contextlib import aclosing

import pytest
from hand_clock import HandClock
from tiny_gateway import BLOCK_TOKENS, answer_text, make_namespace, make_worker_record, tiny_gateway, until

from headrace.core.block import CacheSource, Tier
from headrace.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    IndexUnavailable,
    InvalidRequest,
    Overloaded,
    UnknownModel,
    WorkerUnavailable,
)
from headrace.core.generation import CacheControl, PrefillCall, WorkerId
from headrace.core.members import WorkerRole
from headrace.core.tenants import EVERYBODY
from headrace.gateway.accepted import Accepted
from headrace.gateway.prepare_request import hash_for
from headrace.gateway.route_request import ChoiceFinished, ChoiceToken
from headrace.wire.client_request import ClientRequest, SamplingOptions, TextPrompt, TokenPrompt

DECODERS = (make_worker_record("d0"), make_worker_record("d1"))
WITH_PREFILL = (*DECODERS, make_worker_record("p0", WorkerRole.PREFILL))
LONG = TokenPrompt(tuple(range(1, 31)))  # 7 full blocks and 2 tokens: more than the decode worker's own share of 8


def ask(prompt=LONG, *, max_tokens=5, **options) -> ClientRequest:
    return ClientRequest(model="tiny", prompt=prompt, sampling=SamplingOptions(max_tokens=max_tokens), **options)


async def collect(gateway, request):
    """All events; text by choice; the Finished events by choice."""
    events = [event async for event in gateway.service.generate(request, EVERYBODY)]
    assert isinstance(events[0], Accepted)
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, ChoiceToken):
            texts[event.choice] = texts.get(event.choice, "") + event.delta.text
    finished = {event.choice: event for event in events if isinstance(event, ChoiceFinished)}
    return texts, finished


async def collect_into(seen, gateway, request):
    """As `collect`, for streams that end badly."""
    async for event in gateway.service.generate(request, EVERYBODY):
        seen.append(event)


async def test_a_request_gets_the_answer_of_its_prompt_and_its_name(model_path):
    """Fails when tokens are lost, doubled or reordered."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        texts, finished = await collect(gateway, ask())
        call = gateway.worker("d0").calls[0]
        assert texts == {0: answer_text(call.request)}
        assert finished[0].finished.usage.completion_tokens == 5
        assert call.request.prompt.namespace == make_namespace().id
        assert len(gateway.observer.first_tokens) == 1
        gateway.assert_at_rest()


async def test_many_missing_tokens_go_to_a_prefill_worker_and_do_not_count_as_cached(model_path):
    """Fails when the hand-over between workers is shown to the user as a cache hit."""
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        _, cold = await collect(gateway, ask())
        assert isinstance(gateway.worker("p0").calls[0], PrefillCall)
        assert gateway.worker("d0").calls[0].computed_from == 0
        assert gateway.worker("d0").calls[0].hint_nodes[0] == "n0"
        assert cold[0].prefill_worker == "p0"
        assert cold[0].finished.usage.cached.total == 0
        _, warm = await collect(gateway, ask())
        assert warm[0].prefill_worker is None
        assert warm[0].finished.usage.cached.total == 7 * BLOCK_TOKENS


async def test_a_part_that_was_held_before_counts_as_cached_after_a_prefill(model_path):
    """Fails when the prefill worker's reused blocks are not told to the decode worker."""
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        await collect(gateway, ask(TokenPrompt(LONG.token_ids[:9])))  # two full blocks, decoded locally or not
        _, finished = await collect(gateway, ask())
        assert finished[0].prefill_worker == "p0"
        assert finished[0].finished.usage.cached.total == 2 * BLOCK_TOKENS


async def test_few_missing_tokens_are_the_decode_workers_own(model_path):
    """Fails when short prompts take the detour over a prefill worker."""
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        _, finished = await collect(gateway, ask(TokenPrompt(tuple(range(1, 9)))))
        assert finished[0].prefill_worker is None
        assert not gateway.worker("p0").calls


@pytest.mark.parametrize("error", [WorkerUnavailable("p0", "died"), Overloaded("full", retry_after_ms=5)])
async def test_a_failed_prefill_leaves_the_work_to_the_decode_worker(model_path, error):
    """Fails when a prefill worker's fault reaches the client."""
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        gateway.worker("p0").fails = error
        texts, finished = await collect(gateway, ask())
        assert texts[0] == answer_text(gateway.worker("d0").calls[0].request)
        assert finished[0].prefill_worker is None
        assert gateway.observer.recoveries == ["prefill_failed"]
        gateway.assert_at_rest()


@pytest.mark.parametrize("error", [WorkerUnavailable("d0", "died"), Overloaded("full", retry_after_ms=5)])
async def test_a_worker_that_fails_before_its_first_token_is_replaced_by_a_new_attempt(model_path, error):
    """Fails when the retry reuses the attempt's id, asks the same worker, or changes the answer."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        gateway.worker("d0").fails = error
        texts, finished = await collect(gateway, ask())
        first, second = gateway.worker("d0").calls[0], gateway.worker("d1").calls[0]
        assert first.attempt_id != second.attempt_id
        assert first.request.request_id == second.request.request_id
        assert texts[0] == answer_text(first.request)
        assert finished[0].finished.worker_id == "d1"
        assert gateway.observer.recoveries == ["new_attempt"]
        gateway.assert_at_rest()


async def test_work_of_a_failed_attempt_does_not_count_as_cached(model_path):
    """Fails when blocks that a dead attempt of the same request published are shown as a hit."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        gateway.worker("d0").fails, gateway.worker("d0").fails_after = WorkerUnavailable("d0", "died"), 0
        _, finished = await collect(gateway, ask())
        assert finished[0].finished.worker_id == "d1"
        assert finished[0].finished.usage.cached.total == 0


async def test_after_the_first_token_an_error_ends_the_stream_and_nothing_is_tried_again(model_path):
    """Fails when tokens could be sent twice."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        gateway.worker("d0").fails, gateway.worker("d0").fails_after = WorkerUnavailable("d0", "died"), 2
        seen = []
        with pytest.raises(WorkerUnavailable, match="d0"):
            await collect_into(seen, gateway, ask())
        assert len([event for event in seen if isinstance(event, ChoiceToken)]) == 2
        assert not gateway.worker("d1").calls
        gateway.assert_at_rest()


async def test_a_dead_worker_is_not_chosen_by_the_next_request(model_path):
    """Fails when every request pays for a worker that is known to be dead."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        gateway.worker("d0").fails = WorkerUnavailable("d0", "died")
        await collect(gateway, ask())
        await collect(gateway, ask())
        assert len(gateway.worker("d0").calls) == 1


async def test_a_suspect_is_tried_when_nobody_else_is_left(model_path):
    """Fails when one lost call takes the only worker out of service."""
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        gateway.worker("d0").fails = WorkerUnavailable("d0", "hiccup")
        with pytest.raises(WorkerUnavailable, match="hiccup"):
            await collect(gateway, ask())
        assert not gateway.service.ready()
        gateway.worker("d0").fails = None
        await collect(gateway, ask())


async def test_when_all_workers_are_full_the_client_is_told_to_wait(model_path):
    """Fails when Overloaded is hidden behind another error."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        for worker in gateway.calls.workers.values():
            worker.fails = Overloaded("full", retry_after_ms=5)
        with pytest.raises(Overloaded) as raised:
            await collect(gateway, ask())
        assert raised.value.retry_after_ms == 5
        assert [len(worker.calls) for worker in gateway.calls.workers.values()] == [1, 1]
        gateway.assert_at_rest()


async def test_a_hanging_worker_costs_the_deadline_and_no_more(model_path):
    """Fails when a wait has no bound."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        gateway.worker("d0").hangs = True
        async with asyncio.timeout(60):
            with pytest.raises(DeadlineExceeded):
                await collect(gateway, ask(timeout_ms=100))
        gateway.assert_at_rest()


async def test_closing_the_stream_ends_the_work_at_once(model_path):
    """Fails when a client that left keeps a worker busy."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        gateway.worker("d0").token_seconds = 0.01
        async with aclosing(gateway.service.generate(ask(max_tokens=200), EVERYBODY)) as events:
            async for event in events:
                if isinstance(event, ChoiceToken):
                    break
        gateway.assert_at_rest()
        made = gateway.worker("d0").tokens_made
        await asyncio.sleep(0.05)
        assert gateway.worker("d0").tokens_made == made


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_cancelling_while_a_worker_computes_ends_its_call(model_path, stage):
    """Fails when cancellation is lost before the first token."""
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        worker = gateway.worker("p0" if stage == "prefill" else "d0")
        worker.hangs = True
        task = asyncio.create_task(collect(gateway, ask()))
        await until(lambda: worker.open_calls)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        gateway.assert_at_rest()


async def test_choices_are_separate_attempts_after_one_prefill(model_path):
    """Fails when choices share an attempt id or a seed, or when each is prefilled."""
    request = ClientRequest(
        model="tiny", prompt=LONG, choices=3, sampling=SamplingOptions(max_tokens=4, temperature=1.0, seed=7)
    )
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        texts, finished = await collect(gateway, request)
        decodes = [
            call for w in gateway.calls.workers.values() for call in w.calls if not isinstance(call, PrefillCall)
        ]
        assert len(gateway.worker("p0").calls) == 1
        assert len({call.attempt_id for call in decodes}) == 3
        assert sorted(texts.values()) == sorted(answer_text(call.request) for call in decodes)
        assert {call.request.sampling.seed for call in decodes} == {7, 8, 9}
        assert set(finished) == {0, 1, 2}
        assert all(event.finished.usage.cached.total == 0 for event in finished.values())
        gateway.assert_at_rest()


async def test_a_choice_does_not_count_what_another_choice_computed_as_cached(model_path):
    """Fails when a copy in a pool that nobody else can read makes a sibling's fresh work look like a hit."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        await gateway.calls.index.register(
            holder=DECODERS[1].holder_id,
            incarnation=DECODERS[1].incarnation,
            tier=Tier.DEVICE,
            namespace=make_namespace().id,
            blocks=hash_for(make_namespace(), LONG.token_ids).chain,
        )
        _, finished = await collect(gateway, ask(choices=3, decode_worker=WorkerId("d0")))
        assert [event.finished.usage.cached.total for event in finished.values()] == [0, 0, 0]


async def test_one_failed_choice_ends_the_others(model_path):
    """Fails when the streams of the other choices stay open after an error."""
    async with tiny_gateway(*DECODERS, model_path=model_path, clock=HandClock()) as gateway:  # no queue drains
        gateway.worker("d0").fails, gateway.worker("d0").fails_after = WorkerUnavailable("d0", "died"), 1
        gateway.worker("d0").token_seconds, gateway.worker("d1").token_seconds = 0.3, 60.0
        with pytest.raises(WorkerUnavailable):
            await collect(gateway, ask(choices=4))
        assert gateway.worker("d1").calls, "the other worker must have been at work"
        gateway.assert_at_rest()


async def test_without_an_index_requests_go_on_without_a_match(model_path):
    """Fails when Redis being away costs more than hits."""

    class AwayIndex:
        async def longest_prefix(self, namespace, chain):
            raise IndexUnavailable("away")

    async with tiny_gateway(*DECODERS, model_path=model_path, index=AwayIndex()) as gateway:
        texts, _ = await collect(gateway, ask())
        assert texts[0] == answer_text(gateway.worker("d0").calls[0].request)
        assert gateway.observer.recoveries == ["index_unavailable"]


async def test_a_bypassing_request_is_computed_cold_by_its_decode_worker(model_path):
    """Fails when bypass still reads the cache or hands work over through it."""
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        await collect(gateway, ask())
        _, finished = await collect(gateway, ask(cache=CacheControl(sources=frozenset())))
        assert finished[0].finished.usage.cached.total == 0
        assert len(gateway.worker("p0").calls) == 1


async def test_named_workers_are_honoured_and_unknown_ones_refused(model_path):
    """Fails when a worker that the caller asks for is only a wish."""
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        _, finished = await collect(gateway, ask(decode_worker=WorkerId("d1"), prefill_worker=WorkerId("p0")))
        assert finished[0].finished.worker_id == "d1"
        assert gateway.observer.decisions == ["asked"]
        for param, wrong in (("decode_worker", "p0"), ("prefill_worker", "nobody")):
            with pytest.raises(InvalidRequest) as raised:
                await collect(gateway, ask(**{param: WorkerId(wrong)}))
            assert raised.value.param == param
        gateway.assert_at_rest()


async def test_a_named_worker_that_dies_is_not_replaced_by_another(model_path):
    """Fails when a request for one worker is answered by a different one, or blamed on the caller."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        gateway.worker("d1").fails = WorkerUnavailable("d1", "died")
        with pytest.raises(WorkerUnavailable, match="died"):
            await collect(gateway, ask(decode_worker=WorkerId("d1")))
        assert not gateway.worker("d0").calls


async def test_a_salt_keeps_callers_apart_and_the_same_salt_joins_them(model_path):
    """Fails when a salt is ignored, or when it changes anything but the namespace."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        hits = []
        for salt in ("", "a", "a", "b", ""):
            _, finished = await collect(gateway, ask(cache_salt=salt))
            hits.append(finished[0].finished.usage.cached.total)
        assert hits == [0, 0, 7 * BLOCK_TOKENS, 0, 7 * BLOCK_TOKENS]


async def test_sources_that_are_not_allowed_are_not_counted_on(model_path):
    """Fails when the plan relies on blocks that the request may not read."""
    only_device = CacheControl(sources=frozenset({CacheSource.DEVICE}))
    async with tiny_gateway(*WITH_PREFILL, model_path=model_path) as gateway:
        await collect(gateway, ask(cache=only_device))
        assert not gateway.worker("p0").calls


async def test_more_requests_than_the_bound_are_refused_at_once(model_path):
    """Fails when admission has no bound, or a refused request takes a place."""
    async with tiny_gateway(*DECODERS, model_path=model_path, inflight_max=2) as gateway:
        for worker in gateway.calls.workers.values():
            worker.hangs = True
        held = [asyncio.create_task(collect(gateway, ask(timeout_ms=60_000))) for _ in range(2)]
        await until(lambda: gateway.service.inflight == 2)
        with pytest.raises(Overloaded) as raised:
            await collect(gateway, ask())
        assert raised.value.retry_after_ms > 0
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        gateway.assert_at_rest()


@pytest.mark.parametrize(
    ("request_", "error", "param"),
    [
        (ask(TokenPrompt((1, 2, 99_999))), InvalidRequest, "prompt"),
        (ask(TokenPrompt(tuple([1] * 256))), ContextExceeded, "prompt"),
        (ask(max_tokens=227), ContextExceeded, "max_tokens"),
        (ask(TextPrompt("x" * 100_000)), ContextExceeded, "prompt"),
        (ClientRequest(model="other", prompt=LONG), UnknownModel, "model"),
    ],
    ids=["unknown token id", "prompt too long", "output too long", "text too long", "unknown model"],
)
async def test_wrong_requests_touch_no_worker(model_path, request_, error, param):
    """Fails when a request that cannot be served reaches a worker."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        with pytest.raises(error) as raised:
            await collect(gateway, request_)
        assert raised.value.param == param
        if error is ContextExceeded and "characters" not in str(raised.value):
            assert re.search(
                r"25[67] tokens are \d+ KV blocks of \d+; the roomiest worker's pool has", str(raised.value)
            )
        assert not any(worker.calls for worker in gateway.calls.workers.values())
        gateway.assert_at_rest()


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(255, 1), (250, 6), (1, 255)])
async def test_prompts_up_to_the_very_limit_are_served(model_path, prompt_tokens, max_tokens):
    """Fails when the bound is off by one."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        texts, _ = await collect(gateway, ask(TokenPrompt(tuple([1] * prompt_tokens)), max_tokens=max_tokens))
        assert len(texts[0]) == max_tokens


async def test_output_is_bounded_by_what_the_context_leaves_when_the_caller_names_no_bound(model_path):
    """Fails when an unset max_tokens is refused, or runs past the context."""
    async with tiny_gateway(*DECODERS, model_path=model_path) as gateway:
        request = ClientRequest(model="", prompt=LONG)
        _, finished = await collect(gateway, request)
        assert finished[0].finished.usage.completion_tokens == 256 - 30


async def test_a_prefill_worker_with_less_room_is_passed_over(model_path):
    """Fails when a prompt goes to a worker whose limits it exceeds."""
    small = make_worker_record("p0", WorkerRole.PREFILL, context_tokens_max=16)
    async with tiny_gateway(*DECODERS, small, model_path=model_path) as gateway:
        await collect(gateway, ask())
        assert not gateway.worker("p0").calls
