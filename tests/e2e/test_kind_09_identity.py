"""Requests are told apart by what the server mints, whatever clients call them."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live_load import ask_all, cold_ids, make_token_ids, wait_until_at_rest
from local_system import BLOCK_TOKENS, LocalSystem

IDS = [None, b"", b"x" * 20_000, "é:/日".encode(), b"a:b/c", b"same", b"same"]


def complete(system: LocalSystem, prompt: list[int], *, headers: dict | None = None, **fields: object) -> dict:
    """One completion over HTTP; of a stream, its choices' ends and its usage."""
    body = {"model": system.client.list_models()[0].id, "prompt": prompt, "max_tokens": 6, "temperature": 1} | fields
    url = f"{system.state.http_url}/v1/completions"
    if not fields.get("stream"):
        reply = httpx.post(url, json=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
        assert len(reply.headers.get_list("x-request-id")) == 1
        return reply.json()
    with httpx.stream("POST", url, json=body | {"stream_options": {"include_usage": True}}, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    return {"choices": sorted(ends, key=lambda choice: choice["index"]), "usage": chunks[-1]["usage"]}


def test_strange_and_missing_request_ids_are_served_and_kept_apart(system: LocalSystem):
    """Fails when a client's id names anything inside, or comes back twice."""
    prompts = [make_token_ids(40, seed=90_000 + i) for i in range(len(IDS))]
    one_by_one = [complete(system, prompt, temperature=0)["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(len(IDS)) as pool:
        headers = [None if request_id is None else {"x-request-id": request_id} for request_id in IDS]
        calls = [
            pool.submit(complete, system, p, headers=h, temperature=0) for p, h in zip(prompts, headers, strict=True)
        ]
        replies = [call.result() for call in calls]
    assert [reply["choices"][0]["text"] for reply in replies] == one_by_one
    assert len({reply["id"] for reply in replies}) == len(IDS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_four_choices_of_each_of_ten_requests_at_once_all_end(system: LocalSystem, stream: bool):
    """Fails when choices of one request meet each other's state, or the prompt is counted per choice."""

    def check(number: int) -> tuple[list[int], int]:
        reply = complete(system, make_token_ids(40 + number, seed=91_000 + number), n=4, seed=5, stream=stream)
        return [choice["index"] for choice in reply["choices"]], reply["usage"]["prompt_tokens"]

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(check, range(10))) == [([0, 1, 2, 3], 40 + number) for number in range(10)]


def test_one_cold_prompt_eight_times_at_once_is_stored_once(system: LocalSystem):
    prompt = make_token_ids(6 * BLOCK_TOKENS, seed=92_000)
    expected = cold_ids(system, [prompt])
    assert [result.token_ids for result in ask_all(system, [prompt] * 8)] == expected * 8
    wait_until_at_rest(system)
    stored = [block for block in system.client.list_blocks().blocks if block.tier == "host"]
    mine = [
        block for block in stored if list(block.token_ids) == prompt[block.position * BLOCK_TOKENS :][:BLOCK_TOKENS]
    ]
    assert sorted(block.position for block in mine) == list(range(6))
