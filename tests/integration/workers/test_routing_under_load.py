"""Where requests go while a system is busy: hot prompts, long conversations, new workers, two models side by side."""

import asyncio
import shutil
from collections import Counter

import torch
from transformers import LlamaForCausalLM

from headrace.core.generation import CacheControl
from headrace.core.members import WorkerRole

from .gateway_kit import load_again, small_system
from .priced_steps import PricedSteps

B = 8
BYPASS = CacheControl(sources=frozenset(), publish=False)


async def test_a_hot_prompt_spreads_over_four_workers_and_is_computed_a_few_times_only(
    store_node, make_worker, membership, tiny_models, prompts
):
    """Fails when one worker gets the whole crowd because it was first to have the prompt, or each of the hundred
    computes it: a head of ten blocks is asked for a hundred times at once, with many tails, in two waves."""
    workers = [await make_worker(f"w{number}") for number in range(3)]
    workers.append(await make_worker("w3", model=load_again(tiny_models[0], block_tokens=B, pool_blocks=96)))
    head = prompts(10 * B, salt=200)
    asked = [[*head, *prompts(1 + number % 7, salt=201 + number)] for number in range(100)]
    expected = [(await workers[0].cold(token_ids, max_tokens=2)).token_ids for token_ids in asked[:7]]
    async with small_system(*workers, index=store_node._index, membership=membership) as system:
        await system.listed("w0", "w1", "w2", "w3")
        for _ in range(2):
            answers = await asyncio.gather(*(system.ask(token_ids) for token_ids in asked))
            assert [answer.token_ids for answer in answers[:7]] == expected
            spread = Counter(answer.worker_id for answer in answers)
            # Not even shares: the four share one process here, so that what each measures of itself differs by chance,
            # and who seems many times as fast is rightly sent many times as much.
            assert max(spread.values()) <= 90, spread
            await system.announced(*workers)  # what each has measured of itself meanwhile
        assert sum(answer.cached.total for answer in answers) > 0.8 * 100 * 10 * B


async def test_a_prompt_that_nobody_knows_goes_to_the_idle_worker(store_node, make_worker, membership, prompts):
    """Fails when what a worker holds draws requests that do not share it, or its long answers do not count: one is busy
    with six of them and holds little, the other has nothing to do and holds much."""
    steps = PricedSteps()
    busy, idle = await make_worker("busy", steps=steps), await make_worker("idle", steps=PricedSteps())
    for number in range(6):
        await idle.decode(prompts(12 * B, salt=300 + number))
    steps.hold_after = lambda rows: len(rows) == 6  # all of them are in the batch, and stay there
    async with small_system(busy, idle, index=store_node._index, membership=membership) as system:
        await system.listed("busy", "idle")
        streams = [
            asyncio.create_task(busy.decode(prompts(B, salt=310 + number), cache=BYPASS, max_tokens=60))
            for number in range(6)
        ]
        async with asyncio.timeout(60):
            while steps.may_go.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert busy.worker.engine.load().running == 6
        await system.announced(busy, idle)
        asked = [prompts(4 * B, salt=320 + number) for number in range(4)]
        try:  # whoever is sent to the busy one waits until its time is over
            answers = [await system.ask(token_ids, max_tokens=1, timeout_ms=60_000) for token_ids in asked]
        finally:
            steps.hold_after = lambda rows: False
            steps.may_go.set()
            await asyncio.gather(*streams)
    assert [answer.worker_id for answer in answers] == ["idle"] * 4


async def test_a_conversation_stays_with_its_worker_and_each_turn_reuses_more(
    store_node, make_worker, membership, prompts
):
    """Fails when turns hop between two idle workers, or a turn loses what the one before has computed."""
    first, second = [await make_worker(name, steps=PricedSteps()) for name in ("first", "second")]
    async with small_system(first, second, index=store_node._index, membership=membership) as system:
        await system.listed("first", "second")
        history, served, cached = prompts(3 * B, salt=330), [], []
        for turn in range(10):
            answer = await system.ask(history, max_tokens=B)
            served.append(answer.worker_id)
            cached.append(answer.cached.total)
            history = [*history, *answer.token_ids, *prompts(B, salt=331 + turn)]
            await asyncio.gather(first.published(), second.published())
    assert max(Counter(served).values()) >= 9, served
    assert cached == sorted(set(cached)), "each turn reuses more than the one before"


async def test_workers_that_come_under_load_get_work_and_hold_nobody_up(store_node, make_worker, membership, prompts):
    """Fails when a new worker waits for the old ones' blocks to be its own, or its coming stalls a stream."""
    old = await make_worker("old")
    token_ids = [prompts(3 * B, salt=340 + number) for number in range(8)]
    expected = [(await old.cold(prompt, max_tokens=12)).token_ids for prompt in token_ids]
    served: Counter[str] = Counter()
    async with small_system(old, index=store_node._index, membership=membership) as system:
        await system.listed("old")
        enough = asyncio.Event()

        async def call(number: int) -> None:
            while not enough.is_set():
                answer = await system.ask(token_ids[number], max_tokens=12, timeout_ms=60_000)
                assert answer.token_ids == expected[number]
                served[answer.worker_id] += 1

        async with asyncio.TaskGroup() as callers:
            for number in range(8):
                callers.create_task(call(number))
            async with asyncio.timeout(60):
                while served["old"] < 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
                new = await make_worker(f"new {role.value}", role=role)
                system.calls.workers[new.worker.worker_id] = new
            async with asyncio.timeout(60):
                while served["new decode"] < 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await system.ask(prompts(40 * B, salt=350), prefill_worker="new prefill")
            enough.set()
    assert [call.worker_id for call in system.calls.prefills].count("new prefill") == 1
    assert "new prefill" not in served


async def test_two_models_side_by_side_never_meet_and_no_prefill_worker_decodes(
    store_node, make_worker, membership, tiny_models, prompts, tmp_path
):
    """Fails when a request reaches a worker of the other model or a worker of the other role, while one of the workers
    stops and another one comes under load; or blocks of one model are used for the other (its answers would differ)."""
    torch.manual_seed(6)
    other = LlamaForCausalLM(LlamaForCausalLM.from_pretrained(tiny_models[0].path).config)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tiny_models[0].path / "tokenizer.json", tmp_path / "other")
    loaded = {
        "one": tiny_models,
        "two": [
            load_again(tiny_models[0], block_tokens=B, pool_blocks=96, path=str(tmp_path / "other")) for _ in range(2)
        ],
    }
    roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
    by_model = {
        name: [
            await make_worker(f"{name} {role.value}", role=role, model=model)
            for role, model in zip(roles, models[:2], strict=True)
        ]
        for name, models in loaded.items()
    }
    names = {name: workers[0].worker.record().model for name, workers in by_model.items()}
    token_ids = [prompts(length * B + 3, salt=360 + length) for length in (2, 8, 16, 30)]
    expected = {
        name: [(await workers[1].cold(prompt, max_tokens=2)).token_ids for prompt in token_ids]
        for name, workers in by_model.items()
    }
    assert expected["one"] != expected["two"]
    everybody = [tested for workers in by_model.values() for tested in workers]
    async with small_system(*everybody, index=store_node._index, membership=membership) as system:
        await system.listed(*(tested.worker.worker_id for tested in everybody))
        enough = asyncio.Event()

        async def call(name: str, number: int) -> None:
            while not enough.is_set():
                through = f"{name} prefill" if number == 3 else None
                answer = await system.ask(token_ids[number], model=names[name], prefill_worker=through)
                assert answer.token_ids == expected[name][number]
                number = (number + 1) % len(token_ids)

        async with asyncio.TaskGroup() as callers:
            for name in by_model:
                for number in range(3):
                    callers.create_task(call(name, number))
            again = await make_worker("one decode again", role=WorkerRole.DECODE, model=tiny_models[2])
            system.calls.workers[again.worker.worker_id] = again
            await system.listed(*(tested.worker.worker_id for tested in everybody), "one decode again")
            await by_model["one"][1].worker.stop()

            def workers(calls) -> set[tuple[str, str]]:
                return {(each.request.model, each.worker_id) for each in calls}

            async with asyncio.timeout(60):
                while (names["one"], "one decode again") not in workers(system.calls.decodes) or len(  # noqa: ASYNC110
                    workers(system.calls.prefills)
                ) < 2:
                    await asyncio.sleep(0.05)
            enough.set()
        decoded, prefilled = workers(system.calls.decodes), workers(system.calls.prefills)
    assert decoded == {(names["one"], "one decode"), (names["one"], "one decode again"), (names["two"], "two decode")}
    assert prefilled == {(names["one"], "one prefill"), (names["two"], "two prefill")}
