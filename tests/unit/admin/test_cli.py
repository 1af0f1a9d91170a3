"""The command line against a real gRPC server: results on stdout, JSON that parses, exit codes by error class."""

import json

import pytest
import yaml
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.client import HeadraceClient
from headrace.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    UnknownModel,
    WorkerUnavailable,
)
from headrace.core.tenants import HashedKey


@pytest.fixture
def run(small_gateway, tmp_path, monkeypatch):
    """Run `headrace ...` against the small gateway, away from this user's own settings."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    return lambda *args, **kwargs: CliRunner().invoke(main, list(args), catch_exceptions=False, **kwargs)


def fill(small_gateway, *prompts: str) -> None:
    with HeadraceClient(small_gateway.address) as client:
        for prompt in prompts:
            client.generate(prompt)


def test_generate_prints_the_answer_on_stdout_and_the_numbers_on_stderr(run):
    done = run("generate", "hello there")
    assert (done.exit_code, done.stdout) == (0, "hello there\n")
    assert "prompt 11 tokens, cached 0, first token" in done.stderr


def test_generate_reads_the_prompt_from_standard_input(run):
    assert run("generate", input="from a pipe").stdout == "from a pipe\n"


@pytest.mark.parametrize("how", ["standard input", "a file", "a file by name of standard input"])
def test_the_newline_that_an_editor_puts_at_the_end_is_no_part_of_a_prompt(run, small_gateway, tmp_path, how):
    """Fails when a prompt from a file is another than the one that was pinned from the same file."""
    (tmp_path / "prompt.txt").write_text("two\nlines\n")
    given = {"standard input": [], "a file": ["--file", str(tmp_path / "prompt.txt")]}.get(how, ["--file", "-"])
    run("generate", *given, input="two\nlines\n")
    run("cache", "why-miss", *(given or ["-"]), input="two\nlines\n")
    assert [small_gateway.requests[0].text, small_gateway.questions[0].text] == ["two\nlines"] * 2


@pytest.mark.parametrize("command", [["generate"], ["cache", "why-miss"]], ids=" ".join)
@pytest.mark.parametrize(
    "given", [["text", "--token-ids", "1"], ["text", "--file", "-"], ["--token-ids", "1", "--chat"]], ids=" ".join
)
def test_two_prompts_at_once_are_refused(run, small_gateway, command, given):
    """Fails when one of them is dropped without a word."""
    assert run(*command, *given, input="x").exit_code == 2
    assert small_gateway.requests == small_gateway.questions == []


def test_an_empty_prompt_is_sent_as_such_and_waits_for_no_input(run, small_gateway):
    """Fails when `generate "$UNSET"` reads a terminal."""
    run("generate", "", input="other")
    assert [request.text for request in small_gateway.requests] == [""]


def test_generate_json_is_one_document_with_cached_tokens_by_source_and_their_sum(run):
    run("generate", "twelve chars.")
    answer = json.loads(run("generate", "twelve chars.", "--json", "--max-tokens", "3").stdout)
    assert (answer["text"], answer["token_ids"]) == ("twe", [116, 119, 101])
    assert answer["usage"]["cached_tokens"] == {"device": 4, "shared_memory": 8, "grpc": 0, "total": 12}


def test_cache_options_reach_the_request(run, small_gateway):
    run("generate", "x", "--source", "grpc", "--no-publish", "--decode-worker", "d7", "--timeout", "2m")
    sent = small_gateway.requests[0]
    assert (list(sent.cache.sources), sent.cache.no_publish, sent.cache.decode_worker) == ([3], True, "d7")
    assert sent.timeout_ms == 120_000


def test_token_ids_and_chat_are_sent_as_what_they_are(run, small_gateway):
    run("generate", "--token-ids", "72, 105")
    run("generate", "--system", "Be brief", "Hi")
    assert list(small_gateway.requests[0].token_ids.ids) == [72, 105]
    assert [(m.role, m.content) for m in small_gateway.requests[1].chat.messages] == [
        ("system", "Be brief"),
        ("user", "Hi"),
    ]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (InvalidRequest("max_tokens must not be negative"), 3),
        (UnknownModel("gpt", ["echo-1"]), 3),
        (Overloaded("full", retry_after_ms=100), 4),
        (WorkerUnavailable("d0", "it died"), 5),
        (DeadlineExceeded("decode"), 7),
        (Unauthenticated("no API key was sent"), 10),
        (PermissionDenied("see it"), 10),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
@pytest.mark.parametrize("command", [["generate", "x"], ["status"]], ids=["generate", "status"])
def test_each_class_of_error_has_its_exit_code_and_its_message(run, small_gateway, command, failure, code):
    small_gateway.failure = failure
    done = run(*command, "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["error"]["message"] == str(failure)
    assert str(failure) in done.stderr


@pytest.mark.parametrize("command", [["chat"], ["cache", "verify"]], ids=" ".join)
def test_a_model_is_asked_for_where_several_are_served_and_scripts_are_told_so_too(run, small_gateway, command):
    """Fails when what depends on the server is told as wrong usage, on stderr alone."""
    small_gateway.models = ("echo-1", "echo-2")
    done = run(*command, "--json", input="Hi\n")
    told = json.loads(done.stdout)["error"]
    assert (done.exit_code, told["type"]) == (3, "InvalidRequest")
    assert "--model: echo-1, echo-2" in told["message"]


def test_no_gateway_at_the_address_is_exit_code_6_and_says_how_to_start_one(run):
    done = run("status", "--address", "127.0.0.1:1")
    assert done.exit_code == 6
    assert "headrace up" in done.stderr


def test_every_exit_code_is_documented_in_help(run):
    text = run("--help").stdout
    assert all(f"  {code}  " in text for code in (*range(11), 130))


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_the_api_key_is_sent_by_every_command_and_printed_by_none(run, small_gateway, monkeypatch, how):
    """Fails when a command forgets who calls, or shows the secret, also where it fails."""
    key = "hr-0123456789abcdefghij"
    if how == "environment":
        monkeypatch.setenv("HEADRACE_API_KEY", key)
    given = ["--api-key", key] if how == "flag" else []
    commands = [["generate", "hello"], ["models"], ["status"], ["cache", "ls"], ["cache", "stat"]]
    small_gateway.failure = None
    shown = [run(*command, *given) for command in commands]
    small_gateway.failure = Unauthenticated("the API key is not known here")
    shown += [run("status", *given), run("status", "--json", *given), run("status", "--help")]
    assert set(small_gateway.authorizations) == {f"Bearer {key}"}
    assert len(small_gateway.authorizations) == len(commands) + 3  # a status asks for the books too
    assert not any(key in done.output for done in shown)


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_commands_name_the_application_that_they_mean(run, small_gateway, monkeypatch, how):
    """Fails when a command forgets it: with two applications behind a proxy it would reach none."""
    if how == "environment":
        monkeypatch.setenv("HEADRACE_APPLICATION", "small")
    given = ["--application", "small"] if how == "flag" else []
    commands = [["generate", "hello"], ["models"], ["status"], ["cache", "ls"], ["cache", "evict"], ["doctor"]]
    for command in commands:
        run(*command, *given)
    assert len(small_gateway.applications) >= len(commands)
    assert set(small_gateway.applications) == {"small"}


def test_a_key_is_hashed_from_standard_input_and_not_shown(run):
    """Fails when the line does not stand for the key, or the key is printed."""
    key = "hr-0123456789abcdefghij"
    done = run("tenants", "hash-key", input=key + "\n")
    assert HashedKey.parse(done.stdout.strip()).matches(key)
    assert key not in done.output
    assert run("tenants", "hash-key", input="short\n").exit_code == 3


def test_a_fresh_key_comes_with_its_line(run):
    """Fails when the line is not the key's, or two keys are alike."""
    drawn = [json.loads(run("tenants", "new-key", "--json").stdout) for _ in range(2)]
    assert drawn[0]["key"] != drawn[1]["key"]
    assert all(HashedKey.parse(d["line"]).matches(d["key"]) for d in drawn)


def test_status_lists_nodes_and_workers(run):
    found = json.loads(run("status", "--json").stdout)
    assert found["workers"][0]["worker_id"] == "d0"
    assert found["store_nodes"][0]["node_id"] == "here"
    shown = run("status").stdout
    assert "d0" in shown
    assert "index: available" in shown


def test_the_address_of_the_local_system_is_found_in_its_state_file(run, small_gateway, tmp_path, monkeypatch):
    monkeypatch.delenv("HEADRACE_ADDRESS")
    monkeypatch.setenv("HEADRACE_GRPC_PORT", "1")
    (tmp_path / "state.json").write_text(json.dumps({"grpc_target": small_gateway.address, "ready": True}))
    assert run("models").exit_code == 0
    (tmp_path / "state.json").write_text("{ half")
    assert run("models").exit_code == 6


def test_every_selector_of_an_eviction_reaches_the_gateway_as_it_was_given(run, small_gateway):
    """Fails when an option is lost: the eviction would mean more than was asked."""
    options = ["--node", "n1", "--worker", "worker:w", "--tier", "host", "--older-than", "2h", "--free", "1.5GiB"]
    done = run("cache", "evict", *options, "--prefill-tokens-per-s", "50", "--json")
    assert done.exit_code == 0
    sent = small_gateway.evictions[-1]
    assert (list(sent.selector.holders), sent.selector.tier) == (["node:n1", "worker:w"], "host")
    assert (sent.selector.older_than_s, sent.selector.free_bytes) == (7_200.0, 3 << 29)
    assert (sent.tokens_per_s, sent.dry_run) == (50.0, True)
    found = json.loads(done.stdout)
    assert (found["lost_tokens"], found["recompute_s"], found["tokens_per_s_from"]) == (100, 2.0, "configured")
    assert (
        "2.0 s of recompute (50 tokens/s, configured)"
        in run("cache", "evict", *options, "--prefill-tokens-per-s", "50").stderr
    )
    assert run("cache", "evict", "--free", "many").exit_code == 2


def test_chat_keeps_its_history_and_shows_what_was_cached(run, small_gateway):
    done = run("chat", input="first\nsecond\n/exit\n")
    assert done.exit_code == 0
    assert done.stdout == "you said first\nyou said second\n"
    assert [m.role for m in small_gateway.requests[1].chat.messages] == ["user", "assistant", "user"]
    second_turn = [line for line in done.stderr.splitlines() if "[prompt" in line][1]
    assert "shared_memory" in second_turn
    assert "first token" in second_turn


def test_a_model_that_is_not_served_is_told_before_anybody_types(run, small_gateway):
    """Fails when a conversation begins that cannot have an answer."""
    done = run("chat", "--model", "gpt", input="first\n")
    assert (done.exit_code, small_gateway.requests) == (3, [])
    assert "'gpt' is not served here; served: echo-1" in done.stderr


def test_reset_forgets_the_turns_but_not_the_system_message(run, small_gateway):
    run("chat", "--system", "Be brief", input="first\n/reset\nsecond\n")
    for request, text in zip(small_gateway.requests, ("first", "second"), strict=True):
        assert [m.content for m in request.chat.messages] == ["Be brief", text]


def test_a_failed_turn_is_told_and_not_kept(run, small_gateway):
    small_gateway.failure = Overloaded("full", retry_after_ms=100)
    done = run("chat", input="first\n")
    assert "try again in 100 ms" in done.stderr
    assert done.exit_code == 0


def test_chat_json_prints_one_line_a_turn(run, small_gateway):
    """Fails when who reads lines cannot tell which answer is whose, since one failed."""
    done = run("chat", "--json", input="one\ntwo\n")
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["you said one", "you said two"]
    small_gateway.failure = Overloaded("full", retry_after_ms=100)
    (line,) = run("chat", "--json", input="three\n").stdout.splitlines()
    assert json.loads(line)["error"]["type"] == "Overloaded"


def test_cache_ls_shows_prompts_that_part_as_a_tree(run, small_gateway):
    fill(small_gateway, "aaaabbbbcccc.", "aaaabbbbdddd.")
    runs = json.loads(run("cache", "ls", "--text", "--json").stdout)["prefixes"]
    assert [(r["depth"], r["text"], r["num_tokens"]) for r in runs] == [
        (0, "aaaabbbb", 8),
        (1, "cccc", 4),
        (1, "dddd", 4),
    ]
    assert runs[0]["holders"] == ["node:here", "worker:d0"]
    assert "  cccc" in run("cache", "ls", "--text").stdout


@pytest.mark.parametrize("command", [["cache", "ls"], ["cache", "ls", "--blocks"], ["cache", "show", "aaaabbbb"]])
def test_what_users_sent_is_shown_only_when_asked_for(run, small_gateway, command):
    """Fails when a listing shows prompts to whoever looks over an operator's shoulder."""
    fill(small_gateway, "aaaabbbbcccc.")
    for given in ([], ["--json"]):
        assert "bbbb" not in run(*command, *given).stdout
        assert "bbbb" in run(*command, "--text", *given).stdout


def test_cache_ls_says_which_holder_did_not_answer_and_exits_9(run, small_gateway):
    fill(small_gateway, "aaaabbbb.")
    small_gateway.silent_holders.add("worker:d0")
    done = run("cache", "ls")
    assert done.exit_code == 9
    assert "incomplete: worker:d0: did not answer" in done.stderr


def test_cache_stat_shows_sizes_with_units_and_the_token_hit_rate(run, small_gateway):
    fill(small_gateway, "aaaabbbb.")
    shown = run("cache", "stat").stdout
    assert "2.0 KiB" in shown
    assert "50 tokens (25%)" in shown
    assert json.loads(run("cache", "stat", "--json").stdout)["holders"][0]["committed_blocks"] == 2


def test_evicting_without_a_selector_is_refused_unless_all_is_said(run, small_gateway):
    fill(small_gateway, "aaaabbbb.")
    assert run("cache", "evict", "--yes").exit_code == 2
    assert all(len(blocks) == 2 for blocks in small_gateway.holder_blocks.values())
    assert run("cache", "evict", "--all", "--yes").exit_code == 0
    assert not any(small_gateway.holder_blocks.values())


def test_evicting_is_a_dry_run_that_counts_blocks_tokens_and_bytes_per_holder(run, small_gateway):
    fill(small_gateway, "aaaabbbbcccc.")
    report = json.loads(run("cache", "evict", "--prefix", "aaaabbbb", "--json").stdout)
    assert report["dry_run"]
    assert [(r["holder"], r["blocks"], r["tokens"], r["bytes"]) for r in report["reports"]] == [
        ("node:here", 2, 8, 2048),
        ("worker:d0", 2, 8, 2048),
    ]
    assert (report["prefixes"], report["tenants"]) == (2, [{"tenant": "acme", "blocks": 3, "prefixes": 2}])
    shown = run("cache", "evict", "--prefix", "aaaabbbb").stderr
    assert "cut: 2 prompts (acme 2)" in shown
    assert "would evict 4 blocks (16 tokens, 4.0 KiB); nothing was changed" in shown
    assert all(len(blocks) == 3 for blocks in small_gateway.holder_blocks.values())


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--prefix", "aaaabbbb"], {"aaaa", "zzzz"}),
        (["--token-ids", ",".join(str(ord(c)) for c in "aaaabbbb")], {"aaaa", "zzzz"}),
        (["--model", "another"], {"aaaa", "bbbb", "cccc", "zzzz"}),
        (["--model", "echo-1"], set()),
        (["--idle", "10m"], {"aaaa", "bbbb", "cccc"}),
        (["--idle", "10m", "--prefix", "aaaa"], {"aaaa", "bbbb", "cccc", "zzzz"}),
    ],
    ids=["prefix", "token ids", "other model", "model", "idle", "intersection"],
)
def test_evicting_takes_what_is_named_and_nothing_else(run, small_gateway, options, left):
    fill(small_gateway, "aaaabbbbcccc.", "zzzz.")
    for blocks in small_gateway.holder_blocks.values():
        next(b for b in blocks.values() if b.token_ids[0] == ord("z")).idle_s = 3600.0
    assert run("cache", "evict", *options, "--yes").exit_code == 0
    for blocks in small_gateway.holder_blocks.values():
        assert {"".join(map(chr, b.token_ids)) for b in blocks.values()} == left


def test_evicting_by_hash_takes_the_block_and_its_descendants(run, small_gateway):
    fill(small_gateway, "aaaabbbbcccc.")
    listing = json.loads(run("cache", "ls", "--blocks", "--text", "--json").stdout)
    middle = next(b["block_hash"] for b in listing["blocks"] if b["text"] == "bbbb")
    run("cache", "evict", "--hash", middle, "--yes")
    assert json.loads(run("cache", "ls", "--text", "--json").stdout)["prefixes"][0]["text"] == "aaaa"


def test_a_shortened_hash_is_refused(run):
    assert run("cache", "evict", "--hash", "abcd", "--yes").exit_code == 2


def test_a_holder_that_did_not_answer_makes_an_eviction_incomplete(run, small_gateway):
    fill(small_gateway, "aaaabbbb.")
    small_gateway.silent_holders.add("worker:d0")
    done = run("cache", "evict", "--all", "--yes", "--json")
    assert done.exit_code == 9
    reports = {r["holder"]: r for r in json.loads(done.stdout)["reports"]}
    assert (reports["node:here"]["blocks"], reports["worker:d0"]["error"]) == (2, "did not answer")
    assert json.loads(done.stdout)["total"]["blocks"] == 2


def test_config_show_names_the_source_of_every_setting(run, tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("arena_mb: 64\nprefill_workers: 3\n")
    monkeypatch.setenv("HEADRACE_PREFILL_WORKERS", "5")
    done = run("config", "show", "--config", str(tmp_path / "c.yaml"), "--decode-workers", "7", "--no-exact", "--json")
    rows = {row["name"]: (row["value"], row["source"].split()[0]) for row in json.loads(done.stdout)["settings"]}
    assert rows["decode_workers"] == (7, "flag")
    assert rows["exact"] == (False, "flag")
    assert rows["prefill_workers"] == (5, "environment")
    assert rows["arena_mb"] == (64, "file")
    assert rows["block_tokens"] == (64, "default")


def test_config_show_prints_values_as_a_file_has_them(run):
    """Fails when what it shows cannot be pasted into a file of settings."""
    shown = run("config", "show", "--no-exact", "--decode-workers", "7").stdout
    values = {words[0]: yaml.safe_load(words[1]) for words in map(str.split, shown.splitlines()[1:])}
    assert (values["exact"], values["decode_workers"], values["dtype"], values["redis_url"]) == (False, 7, "auto", "")


def test_up_has_a_flag_for_every_setting(run):
    from headrace.config import settings_table

    text = run("up", "--help").stdout
    assert all(f"--{name.replace('_', '-')}" in text for name in settings_table())


def test_a_wrong_setting_is_exit_code_8_before_anything_starts(run):
    done = run("config", "show", "--block-tokens", "0")
    assert done.exit_code == 8
    assert "block_tokens" in done.stderr


def test_output_is_plain_when_it_is_not_a_terminal(run, small_gateway):
    fill(small_gateway, "aaaabbbb.")
    for command in (["status"], ["cache", "ls"], ["cache", "stat"], ["config", "show"]):
        assert "\x1b" not in run(*command).output
