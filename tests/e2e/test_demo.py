"""`headrace demo` and the commands after it, as a user types them, on a tiny model: one system, from start to end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tiny_model import make_tiny_model

from headrace_cluster.ask_every_path import QUESTIONS
from headrace_cluster.demo_report import TEXT_FILE
from headrace_cluster.local_instance import processes_of, read_state

README = Path(__file__).parents[2] / "README.md"
HEADRACE = Path(sys.executable).with_name("headrace")
# A tiny vocabulary cuts the demo's text into a few thousand tokens, as a real one does.
SETTINGS = {
    "HEADRACE_DTYPE": "float32",
    "HEADRACE_TORCH_THREADS": "1",
    "HEADRACE_POOL_TOKENS": "16384",
    "HEADRACE_ARENA_MB": "32",
    "HEADRACE_LOAD_PATIENCE_MS": "10000",
    "HEADRACE_HTTP_PORT": "0",
    "HEADRACE_GRPC_PORT": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def headrace(tmp_path_factory: pytest.TempPathFactory):
    """Run `headrace ...` in a directory and with a state of its own; whatever is up at the end is ended."""
    folder = tmp_path_factory.mktemp("demo")
    text = TEXT_FILE.read_text(encoding="utf-8")
    model = make_tiny_model(folder / "tiny-llama", text=text, vocab_size=1_500, context_tokens_max=8_192)
    environment = os.environ | SETTINGS | {"HEADRACE_MODEL": str(model), "HEADRACE_STATE_DIR": str(folder / "state")}

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HEADRACE, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
            timeout=300,
            check=False,
        )

    run.folder = folder
    yield run
    run("down")


def test_the_demo_prints_every_path_equal_to_cold_and_writes_the_same_rows(headrace):
    """Fails when reuse changes a token, a path did not reuse from where it says, or a kill loses an answer."""
    done = headrace("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((headrace.folder / ".headrace" / "demo.json").read_text())["rows"]
    assert [row["path"] for row in rows] == list(QUESTIONS)
    sources = {"same_worker": "device", "grpc": "grpc"}
    for row in rows:
        assert row["equal_to_cold"]
        assert row["as_meant"]
        assert row["prompt_tokens"] >= 3_000
        assert row["ttft_ms"] > 0
        cached = {source for source, count in row["cached_tokens"].items() if count}
        assert cached == (set() if row["path"] == "cold" else {sources.get(row["path"], "shared_memory")})
        assert row["path"] == "cold" or sum(row["cached_tokens"].values()) >= 3_000
    for shown in ("equal to cold", "first token", "headrace chat", TEXT_FILE.name, "Apache-2.0"):
        assert shown in done.stdout


def test_the_metrics_count_exactly_the_tokens_that_the_answers_reported(headrace):
    """Fails when a source is left out or counted twice, or bypassing requests count as misses."""
    rows = json.loads((headrace.folder / ".headrace" / "demo.json").read_text())["rows"]
    state, samples = read_state(headrace.folder / "state"), {}
    for line in httpx.get(f"{state.http_url}/metrics", timeout=60).text.splitlines():
        if line.startswith("headrace_"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    told = {source: sum(row["cached_tokens"][source] for row in rows) for source in rows[0]["cached_tokens"]}
    counted = {source: samples[f'headrace_cached_tokens_total{{source="{source}"}}'] for source in told}
    assert counted == told
    assert samples["headrace_prefix_cache_hits_total"] == sum(told.values())
    assert samples["headrace_prefix_cache_queries_total"] == sum(row["prompt_tokens"] * row["attempts"] for row in rows)
    assert samples["headrace_time_to_first_token_seconds_count"] >= 2 * len(rows)


def test_a_system_that_runs_is_asked_by_every_path_and_loses_no_part(headrace):
    """Fails when a part is killed, or its table has a row that it did not ask for."""
    state, before = read_state(headrace.folder / "state"), headrace("status", "--json").stdout
    done = headrace("demo", "--connect", state.grpc_target, "--output", "elsewhere", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["path"] for row in rows] == ["cold", "same_worker", "shared_memory", "grpc"]
    assert rows == json.loads((headrace.folder / "elsewhere" / "demo.json").read_text())["rows"]
    assert ids_in(headrace("status", "--json").stdout) == ids_in(before)


def ids_in(status: str) -> set[tuple[str, int]]:
    """Parts and their processes."""
    told = json.loads(status)
    return {(part.get("worker_id") or part["node_id"], part["pid"]) for part in told["workers"] + told["store_nodes"]}


def test_what_the_demo_left_up_chats_lists_and_evicts(headrace):
    """Fails when a command does not find the system by itself, or evicts other than it says."""
    chat = headrace("chat", "--json", "--max-tokens", "4", stdin="Hello\nAnd then?\n")
    assert [json.loads(line)["usage"]["completion_tokens"] > 0 for line in chat.stdout.splitlines()] == [True, True]
    prefixes = json.loads(headrace("cache", "ls", "--text", "--json").stdout)["prefixes"]
    assert any("How a language model remembers" in run["text"] for run in prefixes)
    assert headrace("cache", "evict", "--yes").returncode == 2
    evicted = json.loads(headrace("cache", "evict", "--all", "--yes", "--json").stdout)
    assert evicted["total"]["tokens"] >= 3_000
    assert json.loads(headrace("cache", "ls", "--json").stdout)["prefixes"] == []


@pytest.mark.parametrize("number", [0, 1], ids=["openai", "grpc"])
def test_the_python_in_the_readme_runs_as_it_is_printed(headrace, number):
    """Fails when a name or an argument of the client changes and the README does not. Only the addresses and the model
    are put in."""
    state = read_state(headrace.folder / "state")
    snippet = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[number]
    for printed, here in (
        ("http://127.0.0.1:8000", state.http_url),
        ("127.0.0.1:9000", state.grpc_target),
        ("smollm2-135m-instruct", "tiny-llama"),
    ):
        snippet = snippet.replace(printed, here)
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_down_leaves_nothing_of_it(headrace):
    state = read_state(headrace.folder / "state")
    assert headrace("down").returncode == 0
    assert not processes_of(state.instance_id)
    assert not Path(state.arena_path).exists()
    assert headrace("status").returncode == 6
