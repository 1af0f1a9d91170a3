"""`headrace demo`: the point of the whole, shown on a running system in one table.

Prompts share a long text and end in different questions. Each is asked by one path and compared with the same question
asked cold, on the same system, with the cache bypassed: token ids and text. On the way a worker and the store node are
killed with SIGKILL. A row counts only when the cached tokens came from where its path says.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.client import (
    COLD,
    CacheOptions,
    CacheSource,
    GenerateResult,
    HeadraceClient,
    Message,
    Sampling,
    SystemStatus,
)
from headrace.config import Config
from headrace.core.errors import ConfigInvalid, HeadraceError, WorkerUnavailable
from headrace.core.generation import CachedTokens
from headrace_cluster.launch_local import launch_local
from headrace_cluster.local_instance import InstanceState, default_state_dir, is_alive, read_state

Report = Callable[[str], None]

TEXT_FILE = Path(__file__).with_name("demo_text.md")
TEXT_LICENCE = "written for this project, Apache-2.0"
PREFIX_TOKENS_MIN = 3_000
ANSWER = Sampling(max_tokens=24)
PATHS = {
    "cold": ("cold, prefill worker to decode worker", "What is a token? Answer in one sentence."),
    "same_worker": ("same worker", "What do queries, keys and values do? Answer in one sentence."),
    "shared_memory": (
        "other worker, by shared memory",
        "Why is the KV cache worth its memory? Answer in one sentence.",
    ),
    "grpc": ("other worker, by gRPC", "What are prefill and decode? Answer in one sentence."),
    "after_worker_kill": ("after kill -9 of a worker", "Why are blocks named by a chain? Answer in one sentence."),
    "after_store_restart": ("after a store node restart", "When is loading worth it? Answer in one sentence."),
}

# Behind a stream's end the last blocks are still being registered, and records of members are refreshed every 2 s.
SETTLE_S = 5.0
# A replaced worker loads the model anew; a store node checks what its arena holds.
RECOVERY_TIMEOUT_S = 180.0
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One path. `as_meant`: the cached tokens came from where the path says, and were as many as can be."""

    path: str
    result: GenerateResult
    equal_to_cold: bool
    as_meant: bool

    def as_json(self) -> dict[str, Any]:
        """The row for scripts."""
        cached = self.result.usage.cached
        return {
            "path": self.path,
            "prompt_tokens": self.result.usage.prompt_tokens,
            "cached_tokens": {str(source): count for source, count in cached.by_source().items()},
            "ttft_ms": round(self.result.ttft_ms, 2),
            "equal_to_cold": self.equal_to_cold,
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All rows, and the system that gave them."""

    model: str
    rows: tuple[DemoRow, ...]
    state: InstanceState
    output: Path

    @property
    def equal(self) -> bool:
        """Whether every row is equal to cold and shows what it is meant to show."""
        return all(row.equal_to_cold and row.as_meant for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """What demo.json holds."""
        return {"rows": [row.as_json() for row in self.rows]}

    def preface(self) -> list[str]:
        """What was sent."""
        return [
            f"Model {self.model}. The prompts share {TEXT_FILE.name} ({TEXT_LICENCE}) and end in different questions.",
            "Equal to cold: the same question with the cache bypassed gave the same token ids and the same text.",
        ]

    def table(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, columns and rows."""
        cold_ms = self.rows[0].result.ttft_ms
        rows = [
            [
                PATHS[row.path][0],
                f"{row.result.usage.prompt_tokens:,}",
                cached_by_source(row.result.usage.cached),
                f"{row.result.ttft_ms:,.0f} ms",
                f"{cold_ms / row.result.ttft_ms:.1f}x",
                ("yes" if row.equal_to_cold else "NO") + ("" if row.as_meant else " (reuse NOT as meant)"),
            ]
            for row in self.rows
        ]
        return "", ["path ", "prompt tokens", "cached tokens ", "first token", "against cold", "equal to cold "], rows

    def closing(self) -> list[str]:
        """The verdict, and where the system is."""
        verdict = (
            "Every answer is equal to the cold one." if self.equal else "NOT every row is as it must be; see above."
        )
        return [
            verdict,
            f"The same rows are in {self.output}.",
            "",
            f"The system is up: {self.state.http_url}/v1 (OpenAI-compatible), {self.state.grpc_target} (gRPC).",
        ]


def cached_by_source(cached: CachedTokens) -> str:
    """`3,456 shared_memory`, or `0`."""
    return ", ".join(f"{count:,} {source}" for source, count in cached.by_source().items() if count) or "0"


def run_demo(config: Config, *, output: Path, report: Report) -> DemoReport:
    """Start a system unless one runs, ask by every path, write `output`/demo.json. Leaves the system up.

    Raises LaunchFailed, ConfigInvalid (a running system with fewer than two decode workers), WorkerUnavailable (a
    killed part did not come back).
    """
    state = _running_system(config, report)
    with HeadraceClient(
        state.grpc_target, api_key=os.environ.get("HEADRACE_API_KEY", ""), **state.client_tls
    ) as client:
        demo = _Demo(client, report)
        rows = demo.run()
        found = DemoReport(demo.model, tuple(rows), state, output / "demo.json")
    output.mkdir(parents=True, exist_ok=True)
    found.output.write_text(json.dumps(found.as_json(), indent=1) + "\n", encoding="utf-8")
    return found


def _running_system(config: Config, report: Report) -> InstanceState:
    running = read_state(default_state_dir(config))
    if running is not None and running.ready and is_alive(running):
        report(f"using the system that is up at {running.http_url}")
        return running
    return launch_local(config, report=report)


class _Demo:
    """The paths in order, on one system."""

    def __init__(self, client: HeadraceClient, report: Report) -> None:
        self._client = client
        self._report = report
        self.model = client.list_models()[0].id
        self._block_tokens = client.list_models()[0].block_tokens
        decoders = [worker.worker_id for worker in client.status().workers if worker.role == "decode"]
        if len(decoders) < 2:
            raise ConfigInvalid("decode_workers", "the demo needs two decode workers; end this system (headrace down)")
        self._first, self._second = decoders[:2]
        # A beginning that no earlier run has sent: else nothing would be cold on a system that is up already.
        self._instructions = f"You answer questions about the text that you are given. Session {secrets.token_hex(4)}."
        self._text = TEXT_FILE.read_text(encoding="utf-8")

    def run(self) -> list[DemoRow]:
        """Six rows. The first one fills the cache for the others."""
        memory, grpc, device = CacheSource.SHARED_MEMORY, CacheSource.GRPC, CacheSource.DEVICE
        rows = [self._row("cold", CacheOptions(decode_worker=self._first), expected={})]
        reusable = self._reusable_tokens(rows[0].result)
        time.sleep(SETTLE_S)
        for path, worker, source in (
            ("same_worker", self._first, device),
            ("shared_memory", self._second, memory),
            ("grpc", self._second, grpc),
        ):
            # Nothing is left behind, so that the next path finds on this worker what this one found.
            cache = CacheOptions(sources=frozenset({source}), publish=False, decode_worker=worker)
            rows.append(self._row(path, cache, expected={source: reusable}))
        status = self._client.status()
        self._kill("decode worker", next(w.pid for w in status.workers if w.worker_id == self._first))
        rows.append(self._row("after_worker_kill", CacheOptions(publish=False), expected={memory: reusable}))
        self._kill("store node", status.store_nodes[0].pid)
        before = status.store_nodes[0].incarnation
        self._wait_for("the store node", lambda now: any(n.incarnation > before for n in now.store_nodes))
        time.sleep(SETTLE_S)
        cache = CacheOptions(sources=frozenset({memory}), publish=False)
        rows.append(self._row("after_store_restart", cache, expected={memory: reusable}))
        self._wait_for("the killed worker's replacement", self._is_whole)
        return rows

    def _row(self, path: str, cache: CacheOptions, *, expected: dict[CacheSource, int]) -> DemoRow:
        """Ask by the path, then the same question cold, where the first answer was given."""
        result = self._ask(path, cache)
        cold = self._ask(path, CacheOptions(sources=COLD.sources, publish=False, decode_worker=result.decode_worker))
        equal = (result.token_ids, result.text) == (cold.token_ids, cold.text)
        cached = {source: count for source, count in result.usage.cached.by_source().items() if count}
        self._report(
            f"{PATHS[path][0]}: {result.usage.prompt_tokens:,} prompt tokens, cached "
            f"{cached_by_source(result.usage.cached)}, first token {result.ttft_ms:,.0f} ms, "
            f"bypassing the cache {cold.ttft_ms:,.0f} ms\n  {result.text.strip()!r}"
        )
        return DemoRow(path, result, equal_to_cold=equal, as_meant=self._is_as_meant(cached, expected))

    def _ask(self, path: str, cache: CacheOptions) -> GenerateResult:
        question = f"{self._text}\n\nQuestion: {PATHS[path][1]}"
        messages = [Message("system", self._instructions), Message("user", question)]
        return self._client.generate(messages, sampling=ANSWER, cache=cache)

    def _reusable_tokens(self, first: GenerateResult) -> int:
        """Full blocks before the question, at least: prompts differ from there on only. A lower bound, since the
        questions have different lengths."""
        longest_question_tokens = max(len(question) for _, question in PATHS.values())
        reusable = (first.usage.prompt_tokens - longest_question_tokens) // self._block_tokens * self._block_tokens
        if reusable < PREFIX_TOKENS_MIN:
            raise HeadraceError(f"the shared text has fewer than {PREFIX_TOKENS_MIN} tokens with model {self.model}")
        return reusable

    @staticmethod
    def _is_as_meant(cached: dict[CacheSource, int], expected: dict[CacheSource, int]) -> bool:
        return cached.keys() == expected.keys() and all(cached[source] >= expected[source] for source in expected)

    def _kill(self, what: str, pid: int) -> None:
        self._report(f"kill -9 {pid} ({what})")
        os.kill(pid, signal.SIGKILL)

    def _is_whole(self, now: SystemStatus) -> bool:
        decoders = {worker.worker_id for worker in now.workers if worker.role == "decode"}
        return len(decoders) >= 2 and self._first not in decoders

    def _wait_for(self, what: str, is_back: Callable[[SystemStatus], bool]) -> None:
        give_up_at = time.monotonic() + RECOVERY_TIMEOUT_S
        self._report(f"waiting for {what}")
        while not is_back(self._client.status()):
            if time.monotonic() > give_up_at:
                raise WorkerUnavailable("", f"{what} did not come back within {RECOVERY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
