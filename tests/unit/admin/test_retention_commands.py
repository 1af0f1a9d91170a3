"""`cache pin`, `unpin`, `ttl` and what listings show of them, against a real gRPC server."""

import json
import re

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.client import HeadraceClient


@pytest.fixture
def run(small_gateway, tmp_path, monkeypatch):
    """Run `headrace ...` against the small gateway, away from this user's own settings."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    with HeadraceClient(small_gateway.address) as client:
        client.generate("aaaabbbbcccc.")
    return lambda *args, **kwargs: CliRunner().invoke(main, list(args), catch_exceptions=False, **kwargs)


def test_pinning_says_where_until_when_and_how_much_of_the_budget_it_takes(run, small_gateway):
    """Fails when the duration is lost, or a row does not say what the node reported."""
    done = run("cache", "pin", "--prefix", "aaaabbbb", "--for", "7d")
    assert done.exit_code == 0
    assert small_gateway.orders[0].for_s == 7 * 86_400
    assert "pinned" in done.stdout
    assert "2.0 KiB of 100.0 KiB" in done.stdout
    assert "7.0 d (" in done.stdout
    report = json.loads(run("cache", "pin", "--prefix", "aaaabbbb", "--json").stdout)["reports"][0]
    assert (report["outcome"], report["pinned_bytes"], report["until_unix_ms"]) == ("done", 2048, 0)
    assert not small_gateway.orders[1].HasField("for_s")


@pytest.mark.parametrize("how", ["text", "file", "stdin", "ids", "hash"])
def test_a_prefix_is_named_in_every_way_that_an_eviction_takes(run, small_gateway, tmp_path, how):
    """Fails when one of the forms means another block; a file's last newline is the editor's and not the prompt's."""
    (tmp_path / "p.txt").write_text("aaaabbbb\n")
    tip = next(h for h, b in small_gateway.holder_blocks["node:here"].items() if b.position == 1)
    given = {
        "text": ["--prefix", "aaaabbbb"],
        "file": ["--prefix-file", str(tmp_path / "p.txt")],
        "stdin": ["--prefix-file", "-"],
        "ids": ["--token-ids", ",".join(str(ord(c)) for c in "aaaabbbb")],
        "hash": ["--hash", tip.hex()],
    }[how]
    assert run("cache", "pin", *given, input="aaaabbbb\n").exit_code == 0
    assert small_gateway.orders[0].selector.prefix_text in ("", "aaaabbbb")
    assert small_gateway.holder_blocks["node:here"][tip].pinned_until_unix_ms
    assert run("cache", "unpin", *given, input="aaaabbbb\n").exit_code == 0
    assert not small_gateway.holder_blocks["node:here"][tip].pinned_until_unix_ms


def test_a_refused_pin_is_exit_code_9_and_prints_the_arithmetic(run, small_gateway):
    """Fails when an operator takes a refusal for a pin."""
    small_gateway.pin_bytes_max = 1024
    done = run("cache", "pin", "--prefix", "aaaabbbb")
    assert done.exit_code == 9
    assert "refused" in done.stdout
    assert "incomplete: node:here: refused: 2048 bytes are more than 1024" in done.stderr
    as_json = run("cache", "pin", "--prefix", "aaaabbbb", "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["reports"][0]["outcome"]) == (9, "refused")


def test_a_node_that_does_not_answer_makes_every_order_incomplete(run, small_gateway):
    small_gateway.silent_holders = {"node:here"}
    for order in (["pin"], ["unpin"], ["ttl", "--in", "10m"], ["ttl", "--clear"]):
        done = run("cache", *order, "--prefix", "aaaabbbb")
        assert done.exit_code == 9, order
        assert "incomplete: node:here: did not answer" in done.stderr


def test_pinning_what_nobody_has_fails_and_says_how_to_have_it(run):
    """Fails when a script goes on as if the prefix were kept. To take back what is not there is no failure."""
    done = run("cache", "pin", "--prefix", "zzzz")
    assert done.exit_code == 9
    assert "cache warm" in done.stderr
    for order in (["unpin"], ["ttl", "--in", "10m"], ["ttl", "--clear"]):
        done = run("cache", *order, "--prefix", "zzzz")
        assert done.exit_code == 0
        assert "nothing was changed" in done.stderr


@pytest.mark.parametrize("order", [["pin"], ["unpin"], ["ttl", "--in", "10m"]])
@pytest.mark.parametrize(
    "given",
    [[], ["--model", "echo-1"], ["--prefix", ""], ["--prefix", "a", "--token-ids", "1"], ["--hash", "abcd"]],
    ids=["nothing", "no prefix", "empty", "two", "short hash"],
)
def test_an_order_without_a_plain_prefix_is_refused_before_it_is_sent(run, small_gateway, order, given):
    """Fails when a mistake means more than one prefix."""
    assert run("cache", *order, *given).exit_code == 2
    assert small_gateway.orders == []


@pytest.mark.parametrize("given", [[], ["--in", "10m", "--clear"], ["--in", "soon"]])
def test_a_time_to_live_is_one_moment_or_its_taking_back(run, small_gateway, given):
    assert run("cache", "ttl", "--prefix", "aaaa", *given).exit_code == 2
    assert small_gateway.orders == []


def test_a_time_to_live_out_of_range_is_an_invalid_request(run, small_gateway):
    """Fails when the range that requests have does not hold for operators."""
    for order in (["ttl", "--in", "1s"], ["ttl", "--in", "9999d"], ["pin", "--for", "1s"]):
        assert run("cache", *order, "--prefix", "aaaa").exit_code == 3
    assert run("cache", "ttl", "--in", "9" * 400, "--prefix", "aaaa").exit_code == 2
    assert small_gateway.orders == []


def test_a_time_to_live_is_sent_in_seconds_and_taken_back_by_its_absence(run, small_gateway):
    done = run("cache", "ttl", "--prefix", "aaaabbbb", "--in", "10m")
    assert "goes" in done.stdout
    assert re.search(r"(10\.0|9\.9) min \(", done.stdout)
    assert run("cache", "ttl", "--prefix", "aaaabbbb", "--clear").exit_code == 0
    assert small_gateway.orders[0].ttl_s == 600
    assert not small_gateway.orders[1].HasField("ttl_s")


def test_listings_show_pins_and_times_to_live_where_there_are_any(run):
    """Fails when an operator cannot see what is kept and what goes, or sees columns that say nothing."""
    for command in (["cache", "ls"], ["cache", "ls", "--blocks"]):
        header = run(*command).stdout.splitlines()[0]
        assert "pinned" not in header
        assert "goes in" not in header
    run("cache", "pin", "--prefix", "aaaabbbb", "--for", "12h")
    run("cache", "ttl", "--prefix", "aaaabbbbcccc", "--in", "20m")
    runs = run("cache", "ls").stdout.splitlines()
    assert "12.0 h" in runs[1]
    assert "12.0 h" not in runs[2]
    assert re.search(r"(20\.0|19\.9) min", runs[2])
    blocks = run("cache", "ls", "--blocks", "--node", "here").stdout
    assert "with what follows" in blocks
    shown = run("cache", "show", "aaaabbbb").stdout
    assert "12.0 h" in shown


def test_a_pin_without_an_end_is_shown_as_one(run):
    run("cache", "pin", "--prefix", "aaaabbbb")
    assert "no end" in run("cache", "ls").stdout
    assert "no end" in run("cache", "pin", "--prefix", "aaaabbbb").stdout


def test_an_eviction_counts_what_pins_kept(run, small_gateway):
    """Fails when an operator is not told why blocks stayed."""
    run("cache", "pin", "--prefix", "aaaabbbb")
    done = run("cache", "evict", "--all", "--yes")
    assert "skipped (pinned)" in done.stdout
    total = json.loads(run("cache", "evict", "--all", "--json").stdout)["total"]
    assert (total["blocks"], total["skipped_pinned_blocks"]) == (0, 2)
    assert len(small_gateway.holder_blocks["node:here"]) == 2


def test_a_request_says_how_long_its_blocks_may_stay_where_and_how_soon_it_is_served(run, small_gateway):
    """Fails when an option is lost on its way into the request, of one prompt or of a chat."""
    options = ["--ttl", "5m", "--not-on-disk", "--affinity-key", "k", "--cache-salt", "s", "--priority", "-2"]
    assert run("generate", "x", *options).exit_code == 0
    assert run("chat", *options, input="hi\n").exit_code == 0
    for sent in small_gateway.requests[-2:]:
        cache = sent.cache
        assert (cache.ttl_s, cache.not_on_disk, cache.affinity_key, sent.cache_salt) == (300, True, "k", "s")
        assert sent.priority == -2
    assert run("generate", "x").exit_code == 0
    cache = small_gateway.requests[-1].cache
    assert (cache.ttl_s, cache.not_on_disk, cache.affinity_key) == (0, False, "")
    assert not small_gateway.requests[-1].HasField("priority")
    assert run("generate", "x", "--ttl", "1s").exit_code == 3
    assert run("generate", "x", "--priority", "5").exit_code == 2
