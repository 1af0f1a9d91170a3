"""Every prompt length works: shorter than a block, at a block's edge, one beside it, and wholly cached."""

from concurrent.futures import ThreadPoolExecutor

from live_load import ask, cold_ids, make_token_ids, wait_until_at_rest
from local_system import BLOCK_TOKENS, LocalSystem

from headrace.client.values import Sampling

# The shortest, then a block's edges, also above what a decode worker computes by itself (two blocks).
LENGTHS = [1, 2, *(k * BLOCK_TOKENS + d for k in range(1, 7) for d in (-1, 0, 1, 2))]


def test_every_length_is_answered_alike_cold_warm_and_with_one_token_more(system: LocalSystem):
    """Fails for an edge at which a token is lost, doubled, or taken from a block that is not whole."""

    def check(length: int) -> list[str]:
        prompt, longer = (
            make_token_ids(length, seed=20_000 + length),
            [*make_token_ids(length, seed=20000 + length), 77],
        )
        expected, expected_longer = cold_ids(system, [prompt, longer])
        first, warm, more = ask(system, prompt), ask(system, prompt), ask(system, longer)
        faults = [] if first.token_ids == warm.token_ids == expected else [f"{length}: another answer"]
        faults += [] if more.token_ids == expected_longer else [f"{length}: another answer with one token more"]
        whole = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if not whole - BLOCK_TOKENS <= warm.usage.cached.total <= length - 1:
            faults.append(f"{length}: {warm.usage.cached.total} tokens cached")
        return faults

    with ThreadPoolExecutor(6) as pool:
        faults = [fault for found in pool.map(check, LENGTHS) for fault in found]
    assert faults == []


def test_prompts_shorter_than_a_block_leave_nothing_behind(system: LocalSystem):
    """Fails when a prompt without a whole block reserves or waits for one."""

    def check(number: int) -> int:
        prompt = make_token_ids(1 + number % (BLOCK_TOKENS - 1), seed=21_000 + number)
        return system.client.generate(prompt, sampling=Sampling(max_tokens=1), timeout_s=60).usage.cached.total

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(check, range(100))) == {0}
    wait_until_at_rest(system)
