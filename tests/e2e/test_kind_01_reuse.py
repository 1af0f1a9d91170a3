"""Reuse never changes an answer. Every case proves by the usage figures that there was reuse."""

import random

import torch
from live_load import ask, ask_all, cold_ids, make_token_ids, wait_until_at_rest
from local_system import BLOCK_TOKENS, LocalSystem
from transformers import LlamaForCausalLM

from headrace.client.values import COLD, Message, Sampling

TWENTY_FOUR = Sampling(max_tokens=24, ignore_eos=True)


def test_the_bypass_answers_as_the_plain_library_does(system: LocalSystem, tiny_model):
    """Makes a cold answer the yardstick of all others. Fails when the engine itself computes something else."""
    token_ids = make_token_ids(75, seed=1)
    model = LlamaForCausalLM.from_pretrained(tiny_model).eval()
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        for _ in range(24):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    cold = system.client.generate(token_ids, sampling=TWENTY_FOUR, cache=COLD, timeout_s=60)
    assert cold.usage.cached.total == 0
    assert cold.token_ids == tuple(ids[0, len(token_ids) :].tolist())


def test_the_same_prompt_again_and_again_is_answered_alike(system: LocalSystem):
    prompt = make_token_ids(6 * BLOCK_TOKENS, seed=2)
    (expected,) = cold_ids(system, [prompt])
    results = [ask(system, prompt) for _ in range(20)] + ask_all(system, [prompt] * 8)
    assert {result.token_ids for result in results} == {expected}
    assert results[0].usage.cached.total == 0
    assert {result.usage.cached.total for result in results[1:]} == {5 * BLOCK_TOKENS}


def test_many_tails_on_shared_heads_are_each_answered_as_if_alone(system: LocalSystem):
    """Fails when a block is taken for one of another prompt that begins alike."""
    chosen = random.Random(3)
    heads = [make_token_ids(chosen.randint(2, 6) * BLOCK_TOKENS, seed=300 + i) for i in range(10)]
    prompts = []
    for number in range(60):
        head = chosen.choice(heads)
        prompts.append(
            head[: chosen.randint(1, len(head))] + make_token_ids(chosen.randint(1, 40), seed=3_000 + number)
        )
    results = ask_all(system, prompts)
    assert [result.token_ids for result in results] == cold_ids(system, prompts)
    assert sum(result.usage.cached.total > 0 for result in results) >= 20
    wait_until_at_rest(system)


def test_an_edited_chat_reuses_up_to_the_edit_and_no_further(system: LocalSystem):
    turns = [Message("user" if i % 2 == 0 else "assistant", f"turn {i}: " + "water " * 12) for i in range(7)]
    edited = [*turns[:2], Message("user", turns[2].content.replace("water", "winds", 1)), *turns[3:]]

    def chat(messages: list[Message], **options: object):
        return system.client.generate(messages, sampling=TWENTY_FOUR, timeout_s=60, **options)

    expected, expected_edited = chat(turns, cache=COLD).token_ids, chat(edited, cache=COLD).token_ids
    first, changed, again = chat(turns), chat(edited), chat(turns)
    assert (first.token_ids, changed.token_ids, again.token_ids) == (expected, expected_edited, expected)
    before_the_edit = chat(turns[:3], cache=COLD).usage.prompt_tokens
    assert 0 < changed.usage.cached.total < before_the_edit
    assert again.usage.cached.total >= again.usage.prompt_tokens - 2 * BLOCK_TOKENS
