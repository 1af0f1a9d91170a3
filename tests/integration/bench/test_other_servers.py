"""`headrace bench serve --url` and benchmarks/compare_serving.py against servers that know nothing of Headrace."""

import json
from pathlib import Path

import pytest

COMPARE = Path(__file__).parents[3] / "benchmarks" / "compare_serving.py"
LOAD = ("--requests", 12, "--rate", 200, "--max-tokens", 5, "--set", "gap_s=0.1")


def completions_asked_of(server):
    """The bodies as text, in order."""
    return [json.dumps(body, sort_keys=True) for path, body in server.asked if path != "/v1/models"]


@pytest.mark.parametrize(("chat", "path"), [((), "/v1/completions"), (("--chat",), "/v1/chat/completions")])
async def test_any_openai_compatible_server_is_measured(chat, path, serve_http, make_openai_server, bench_serve):
    """Fails when a page is asked for that only Headrace has, an answer is not counted whole, or what a server does not
    say of its cache is reported as nothing found."""
    server = make_openai_server()
    async with serve_http(server) as url:
        code, found, said = await bench_serve("--url", url, *chat, *LOAD)
    assert code == 0, said
    assert [path for path, _ in server.asked] == ["/v1/models"] + 12 * [path]
    assert found["requests"] == {"sent": 12, "finished": 12, "failed": 0, "interrupted": 0, "not_sent": 0}
    assert found["completion_tokens"] == sum(body["max_tokens"] for _, body in server.asked[1:])
    assert found["cached_tokens"] is None
    assert found["cached_share"] == {"total": None}
    assert "does not say how long its contexts are" in said


async def test_what_a_server_says_of_its_cache_is_counted_though_it_says_nothing_of_misses(
    serve_http, make_openai_server, bench_serve
):
    """vLLM leaves cached tokens out of answers that found none. Fails when those count as unknown, or hits are lost."""
    server = make_openai_server(tells_cached=True)
    async with serve_http(server) as url:
        _, found, said = await bench_serve("--url", url, *LOAD)
    assert 0 < found["cached_tokens"]["any"] < found["prompt_tokens"], said
    assert found["cached_share"]["total"] == pytest.approx(
        found["cached_tokens"]["any"] / found["prompt_tokens"], abs=1e-3
    )


async def test_a_server_that_takes_openais_own_fields_alone_is_measured_too(
    serve_http, make_openai_server, bench_serve
):
    """Fails when a field of ours cannot be left out, or its refusal is not said."""
    server = make_openai_server(extras=frozenset())
    async with serve_http(server) as url:
        _, refused, said = await bench_serve("--url", url, *LOAD)
        _, found, _ = await bench_serve("--url", url, "--stop-at-eos", *LOAD)
    assert refused["errors"] == {"http_400_unknown_field": 12}
    assert "ignore_eos" in said
    assert found["requests"]["finished"] == 12


async def test_a_context_that_is_named_bounds_prompts_and_outputs(serve_http, make_openai_server, bench_serve):
    """Fails when two servers with different contexts cannot be sent the same prompts."""
    server = make_openai_server()
    async with serve_http(server) as url:
        await bench_serve("--url", url, "--context-tokens", 100, *LOAD)
    lengths = [len(body["prompt"]) + body["max_tokens"] for _, body in server.asked[1:]]
    assert 90 < max(lengths) <= 100


async def test_what_a_model_reasons_counts_as_its_tokens(serve_http, make_openai_server, bench_serve):
    """Fails when the first token of a chat is the first one behind its reasoning: gaps would be missing here."""
    async with serve_http(make_openai_server(reasons=True)) as url:
        _, found, said = await bench_serve("--url", url, "--chat", *LOAD)
    assert found["itl_ms"]["p50"] is not None, said


async def compare(run_python, a, b, *options):
    command = (COMPARE, "--a", a, "--b", b, "--json", "--rounds", 2, "--requests", 6, "--warm-up", 2, "--rate", 200)
    code, printed, said = await run_python(*command, "--max-tokens", 5, *options)
    assert code == 0, said
    return json.loads(printed), said


async def test_two_servers_get_the_same_requests_in_turn_and_each_round_others(
    serve_http, make_openai_server, run_python
):
    """Fails when a round's requests differ between the servers, or a round finds what an earlier one left."""
    a, b = make_openai_server(), make_openai_server(tells_cached=True)
    async with serve_http(a) as a_url, serve_http(b) as b_url:
        found, _ = await compare(run_python, a_url, b_url)
    rounds = []
    for first, last in ((0, 2), (2, 8), (8, 14)):
        sent_a, sent_b = (completions_asked_of(server)[first:last] for server in (a, b))
        assert sorted(sent_a) == sorted(sent_b)  # requests that are under way may overtake each other
        rounds += sent_a
    assert len(set(rounds)) == len(rounds) == 14
    rows = {row["figure"]: row for row in found["rows"]}
    for name in ("TTFT p50, ms", "ITL p50, ms", "output tokens/s"):
        row = rows[name]
        assert 0 < row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    assert (rows["cached share"]["a"], rows["cached share"]["ratio"]) == (None, None)
    assert rows["cached share"]["b"] > 0
    assert [each["a"]["requests"]["finished"] for each in found["rounds"]] == [6, 6]


async def test_answers_of_different_lengths_are_said_to_be_no_comparison(serve_http, make_openai_server, run_python):
    """Fails when a server that answers less looks faster and nobody says why."""
    async with serve_http(make_openai_server()) as a, serve_http(make_openai_server(output_tokens_max=1)) as b:
        _, said = await compare(run_python, a, b)
    assert "they did not do the same work" in said


async def test_each_server_gets_its_own_key_and_openais_own_fields_where_it_takes_no_others(
    serve_http, make_openai_server, run_python
):
    """Fails when one server's key is told to the other one, or --stop-at-eos sends what it is there to leave out."""
    a, b = make_openai_server(), make_openai_server(extras=frozenset())
    async with serve_http(a) as a_url, serve_http(b) as b_url:
        options = ("--stop-at-eos", "--api-key-a", "one", "--api-key-b", "two")
        found, _ = await compare(run_python, a_url, b_url, *options)
    assert (a.keys, b.keys) == ({"Bearer one"}, {"Bearer two"})
    assert [each["b"]["requests"]["finished"] for each in found["rounds"]] == [6, 6]


@pytest.mark.parametrize("name", ["--rounds", "--rate", "--requests", "--warm-up", "--max-tokens", "--timeout-s"])
async def test_a_comparison_of_nothing_is_refused_before_anything_is_sent(name, run_python):
    """Fails when it ends in a traceback, or after a minute of work."""
    code, _, said = await run_python(COMPARE, "--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1", name, 0)
    assert code == 2
    assert f"argument {name}: 0 is not" in said
