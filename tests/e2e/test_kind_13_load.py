"""More callers than a small system can serve: each is answered or told to come back, and soon all is well again."""

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from live_load import ask, ask_all, cold_ids, make_token_ids, wait_until_at_rest
from local_system import BLOCK_TOKENS, LocalSystem, wait_until

CALLERS = 1_000


def test_a_thousand_callers_at_once_are_answered_or_told_to_come_back(system: LocalSystem):
    """Fails when the front door breaks or hangs under a thousand connections, or a refusal does not say when to come
    back; and when the system does not serve a few callers as before right after."""
    model = system.client.list_models()[0].id
    base = system.state.http_url
    prompts = [make_token_ids(40, seed=130_000 + number) for number in range(8)]
    before, workers = [result.token_ids for result in ask_all(system, prompts)], system.worker_ids("decode")
    bodies = [json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode() for prompt in prompts]

    async def call(number: int) -> tuple[int, bool]:
        """Status, and whether there was a Retry-After."""
        head, _ = await post(base, "/v1/completions", bodies[number % len(bodies)])
        lines = head.decode().lower().splitlines()
        return int(lines[0].split()[1]), any(line.startswith("retry-after:") for line in lines)

    async def storm() -> list[tuple[int, bool]]:
        async with asyncio.timeout(150):
            return await asyncio.gather(*(call(number) for number in range(CALLERS)))

    answers = asyncio.run(storm())
    counted = Counter(status for status, _ in answers)
    assert counted.keys() <= {200, 429, 503}, counted
    assert counted[200] >= 200, counted
    assert all(retry for status, retry in answers if status != 200)
    assert [result.token_ids for result in ask_all(system, prompts)] == before
    wait_until_at_rest(system)
    wait_until(lambda: system.worker_ids("decode") == workers, what="every worker still a member")


def test_a_hot_prefix_is_computed_a_few_times_and_served_by_both_workers(system: LocalSystem):
    """Fails when many requests that begin alike each compute the beginning, when all of them wait for the one worker
    that has it, or when a tail meets another one's."""
    head = make_token_ids(40 * BLOCK_TOKENS, seed=131_000)
    prompts = [head + make_token_ids(20, seed=131_001 + number) for number in range(48)]
    expected = cold_ids(system, prompts[:8])
    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(lambda prompt: ask(system, prompt), prompts))
    assert [result.token_ids for result in results[:8]] == expected
    computed = sum(len(prompt) - result.usage.cached.total for prompt, result in zip(prompts, results, strict=True))
    assert computed < 8 * len(head)  # 1.5 of them are the tails
    assert {result.decode_worker for result in results} == set(system.worker_ids("decode"))
    wait_until_at_rest(system)


async def post(base: str, path: str, body: bytes) -> tuple[bytes, bytes]:
    """One request on a connection of its own; head and body of the reply."""
    address = urlsplit(base)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        reply = await reader.read()
    finally:
        writer.close()
    head, _, rest = reply.partition(b"\r\n\r\n")
    return head, rest
