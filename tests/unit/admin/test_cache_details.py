"""`cache show`, `cache why-miss` and `cache warm` against a real gRPC server."""

import json

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.client import HeadraceClient
from headrace.core.errors import InvalidRequest, UnknownModel


@pytest.fixture
def run(small_gateway, tmp_path, monkeypatch):
    """Run `headrace ...` against the small gateway, away from this user's own settings."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    return lambda *args, **kwargs: CliRunner().invoke(main, list(args), catch_exceptions=False, **kwargs)


def test_show_tells_of_one_block_on_every_holder_and_how_much_stands_on_it(run, small_gateway):
    """Fails when descendants are shown as copies, or a prefix means another block than its last full one."""
    with HeadraceClient(small_gateway.address) as client:
        client.generate("aaaabbbbcccc")
        hashes = [block.block_hash for block in client.list_blocks().blocks if block.holder == "node:here"]
    by_hash = json.loads(run("cache", "show", hashes[1].hex(), "--json").stdout)
    assert {copy["block_hash"] for copy in by_hash["copies"]} == {hashes[1].hex()}
    assert by_hash["blocks_behind"] == 1
    by_prefix = json.loads(run("cache", "show", "aaaabbbb", "--json").stdout)
    assert by_prefix == by_hash
    shown = run("cache", "show", "aaaabbbb", "--text")
    assert "node:here" in shown.stdout
    assert "'bbbb'" in shown.stdout
    nothing = run("cache", "show", "00" * 16)
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "no holder has it" in nothing.stderr


def test_why_miss_asks_with_the_prompt_as_it_was_given_and_prints_the_reasons(run, small_gateway, tmp_path):
    """Fails when a chat is asked about as text, the salt is lost, or a reason is not shown."""
    (tmp_path / "prompt.txt").write_text("from a file")
    done = run("cache", "why-miss", "--system", "Be brief", "Hi", "--cache-salt", "s")
    run("cache", "why-miss", "--file", str(tmp_path / "prompt.txt"))
    run("cache", "why-miss", "--token-ids", "1,2")
    chat, text, ids = small_gateway.questions
    assert [(turn.role, turn.content) for turn in chat.chat] == [("system", "Be brief"), ("user", "Hi")]
    assert (chat.cache_salt, text.text, list(ids.token_ids)) == ("s", "from a file", [1, 2])
    assert "evicted by operator ann, 9 s ago" in done.stdout
    assert "1-2" in done.stdout
    assert json.loads(run("cache", "why-miss", "x", "--json").stdout)["reasons"][0]["kind"] == "evicted"


def test_a_part_of_a_hash_is_not_taken_for_a_prefix_without_a_word(run, small_gateway):
    """Fails when who copied half a hash is told of a prefix that is too short, and of nothing else."""
    small_gateway.failure = InvalidRequest("the prefix is less than one block", param="prefix_text")
    assert "a block's hash is whole with 32 or 64 digits" in run("cache", "show", "5d0c5b1e").stderr
    assert "hash" not in run("cache", "show", "Once upon").stderr


def test_the_hint_on_whole_hashes_is_not_given_for_another_mistake(run, small_gateway):
    """Fails when who names a model that is not served is told how long hashes are."""
    small_gateway.failure = UnknownModel("gpt", ["echo-1"])
    done = run("cache", "show", "5d0c5b1e", "--model", "gpt")
    assert (done.exit_code, done.stderr) == (3, f"error: {small_gateway.failure}\n")


@pytest.mark.parametrize("line", ['{"bad": 1}', '{"messages": [{"role": "user"}]}', "[1, 2", '{"text": ""}'])
def test_a_line_that_is_no_prompt_is_told_with_its_number_and_what_is_wrong(run, small_gateway, line):
    """Fails when all that is told is the name of a key."""
    done = run("cache", "warm", "-", input=f"fine\n{line}\n")
    assert (done.exit_code, small_gateway.requests) == (3, [])
    assert "line 2: " in done.stderr
    assert not done.stderr.partition("line 2: ")[2].startswith("'")


def test_why_miss_fails_by_the_class_of_what_is_wrong(run, small_gateway):
    """Fails when a wrong question looks like an answer."""
    assert run("cache", "why-miss").exit_code == 2
    assert run("cache", "why-miss", "x", "--request", "r").exit_code == 2
    assert run("cache", "why-miss", "--request", "unknown").exit_code == 3
    small_gateway.silent_holders = {"node:here"}
    assert run("cache", "why-miss", "x").exit_code == 9


def test_warm_sends_each_line_once_and_counts_what_was_there(run, small_gateway):
    """Fails when a form of line is not understood, or what was cached before is counted as new."""
    lines = [
        "plain text!!",
        "[72, 105]",
        '{"text": "plain text!!"}',
        '{"messages": [{"role": "user", "content": "Hi"}]}',
    ]
    done = run("cache", "warm", "-", "--json", input="\n".join(lines) + "\n\n")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert [row["line"] for row in found["prompts"]] == [1, 2, 3, 4]
    assert (found["prompts"][0]["cached_tokens"], found["prompts"][2]["cached_tokens"]) == (0, 8)
    assert [request.WhichOneof("prompt") for request in small_gateway.requests] == ["text", "token_ids", "text", "chat"]
    assert all(request.sampling.max_tokens == 1 for request in small_gateway.requests)
    assert "[4/4] line 4:" in done.stderr


def test_warm_refuses_a_file_that_it_cannot_read_before_it_sends_anything(run, small_gateway):
    """Fails when half a file is sent before a broken line is found."""
    done = run("cache", "warm", "-", input='good\n{"no": 1}\n')
    assert done.exit_code == 3
    assert "line 2" in done.stderr
    assert run("cache", "warm", "-", input="\n").exit_code == 3
    assert small_gateway.requests == []
