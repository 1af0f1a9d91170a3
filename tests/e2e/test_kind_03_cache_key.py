"""A block is found under exactly the tokens that lead to it; what is no key of ours is a miss."""

import httpx
from live_load import ask, cold_ids, load_while, make_token_ids
from local_system import BLOCK_TOKENS, LocalSystem
from redis import Redis


def test_only_a_leading_run_counts(system: LocalSystem):
    """Fails when a block is known by its own tokens and not by all before it."""
    x, y = make_token_ids(3 * BLOCK_TOKENS, seed=31), make_token_ids(3 * BLOCK_TOKENS, seed=32)
    expected = cold_ids(system, [x + y, y + x])
    ask(system, x)
    ask(system, y)
    joined = [ask(system, x + y), ask(system, y + x)]
    assert [result.token_ids for result in joined] == expected
    assert [result.usage.cached.total for result in joined] == [3 * BLOCK_TOKENS] * 2


def test_junk_in_redis_is_a_miss_and_harms_nobody(system: LocalSystem):
    """Foreign types, cut values, unknown fields, other versions and huge values, under the product's own keys."""
    prompts = [make_token_ids(5 * BLOCK_TOKENS, seed=33_000 + i) for i in range(8)]
    for prompt in prompts:
        ask(system, prompt)
    redis = Redis.from_url(system.state.redis_url)

    def spoil() -> None:
        blocks = list(redis.scan_iter("hr1:*}:b:*"))
        assert blocks
        for number, key in enumerate(blocks):
            match number % 4:
                case 0:
                    redis.set(key, b"\x00\xff junk")
                case 1:
                    redis.hset(key, mapping=dict.fromkeys(redis.hkeys(key), b"\xff\xfe"))
                case 2:
                    redis.hset(key, mapping={b"node:nobody": b"00000000000000000009:host", b"x": b"y" * 100_000})
        redis.set("hr2:{members}:ids", "another version")
        redis.set("hr1:{members}:m:worker:cut", b"00000000000000000001:\x83\xa7version", px=60_000)
        redis.set("hr1:{members}:m:worker:huge", b"x" * 1_000_000, px=60_000)
        redis.sadd("hr1:{members}:ids", "worker:cut", "worker:huge", b"\xff", "x" * 5_000)

    outcome = load_while(system, prompts, spoil, after_s=2)
    assert (outcome.errors, outcome.wrong) == ([], 0)
    assert outcome.right > 10
    assert len(system.client.status().workers) == 3
    redis.close()


def test_a_part_that_is_no_text_is_refused(system: LocalSystem):
    """Fails when an image is left out of the key and two different ones share blocks."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for part in (image, {"type": "unheard_of", "text": "x"}):
        body = {"model": system.client.list_models()[0].id, "messages": [{"role": "user", "content": [part]}]}
        reply = httpx.post(f"{system.state.http_url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 400, reply.text
