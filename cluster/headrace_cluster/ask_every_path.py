"""Ask a running system for prompts that share a long text, by every path that its cache has, and judge the answers.

Prompts end in different questions. Each is asked by one path and compared with the same question asked cold, on the
same worker, with the cache bypassed: token ids and text. A row counts only when the cached tokens came from where its
path says. It goes by the client's API alone, so it holds for one machine and for many. How parts are killed is the
caller's: whoever gives no way to do it gets the rows that need none.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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
from headrace.client.admin_values import StoreNodeStatus, WorkerStatus
from headrace.core.errors import ConfigInvalid, HeadraceError, WorkerUnavailable
from headrace_cluster.demo_report import TEXT_FILE, DemoReport, DemoRow, cached_by_source

Report = Callable[[str], None]
# Ends the process of this part as SIGKILL does, on whichever host it is.
Kill = Callable[[WorkerStatus | StoreNodeStatus], None]

ANSWER = Sampling(max_tokens=24)
QUESTIONS = {
    "cold": "What is a token? Answer in one sentence.",
    "same_worker": "What do queries, keys and values do? Answer in one sentence.",
    "shared_memory": "Why is the KV cache worth its memory? Answer in one sentence.",
    "grpc": "What are prefill and decode? Answer in one sentence.",
    "after_worker_kill": "Why are blocks named by a chain? Answer in one sentence.",
    "after_store_restart": "When is loading worth it? Answer in one sentence.",
}

# Behind a stream's end the last blocks are still being registered, and records of members are refreshed every 2 s.
SETTLE_S = 5.0
# A worker computes what takes longer to come, as over a connection that is only being made: then it is asked again.
ATTEMPTS, ATTEMPT_EVERY_S = 5, 1.0
# A replaced worker loads the model anew; a store node checks what its arena holds.
RECOVERY_TIMEOUT_S = 180.0
# Of a cold prompt: what a chat template puts before the first message is the same in all runs, and may fill a block.
TEMPLATE_SHARE_MAX = 0.02
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class SharedText:
    """What all prompts begin with, and how many tokens of it there must be to show something."""

    text: str
    tokens_min: int


def ask_every_path(
    client: HeadraceClient, *, kill: Kill | None, report: Report, shared: SharedText | None = None
) -> DemoReport:
    """Four rows, and with `kill` two more, after a worker and a store node were killed. The first fills the cache.

    report: gets a line for each step. Raises ConfigInvalid (fewer than two workers that decode), HeadraceError (a model
    to which the text is too short), WorkerUnavailable (a killed part did not come back).
    """
    paths = _Paths(client, report, shared or demo_text())
    rows = paths.without_kills()
    if kill is not None:
        rows += paths.with_kills(kill)
    return DemoReport(paths.model, tuple(rows))


def demo_text() -> SharedText:
    """The text of the demo: some pages."""
    return SharedText(TEXT_FILE.read_text(encoding="utf-8"), 3_000)


@dataclass(frozen=True, slots=True)
class _Cast:
    """Which workers are asked.

    first: computes. near: reads what `first` left in their host's store node; `first` itself where it is alone there.
    far: reads that over gRPC; of another host if there is one.
    """

    first: WorkerStatus
    near: WorkerStatus
    far: WorkerStatus

    @classmethod
    def of(cls, decoders: list[WorkerStatus]) -> "_Cast":
        """Raises ConfigInvalid where there is one worker."""
        if len(decoders) < 2:
            alike = f"the demo needs two decode workers that compute alike; this system has {len(decoders)}"
            raise ConfigInvalid("decode_workers", alike)

        def others(of: WorkerStatus, *, beside: bool) -> list[WorkerStatus]:
            return [w for w in decoders if w is not of and (w.store_node == of.store_node) == beside]

        first = max(decoders, key=lambda worker: len(others(worker, beside=True)))  # the first of several
        beside, abroad = others(first, beside=True), others(first, beside=False)
        return cls(first, near=(beside or [first])[0], far=(abroad or beside)[0])

    def title(self, path: str, result: GenerateResult) -> str:
        """The path in words."""
        handed_over = result.prefill_worker not in ("", result.decode_worker)
        return {
            "cold": "cold, prefill worker to decode worker" if handed_over else "cold",
            "same_worker": "same worker",
            "shared_memory": f"{'same' if self.near is self.first else 'other'} worker, by shared memory",
            "grpc": f"other {'worker' if self.far.store_node == self.first.store_node else 'host'}, by gRPC",
            "after_worker_kill": "after kill -9 of a worker",
            "after_store_restart": "after a store node restart",
        }[path]


class _Paths:
    """The paths in order, on one system."""

    def __init__(self, client: HeadraceClient, report: Report, shared: SharedText) -> None:
        self._client = client
        self._report = report
        self._shared = shared
        served = client.list_models()[0]
        self.model = served.id
        self._block_tokens = served.block_tokens
        # Machines whose arithmetic differs have namespaces of their own and share nothing: the most that are alike.
        found = [
            worker for worker in client.status().workers if worker.role != "prefill" and worker.model == self.model
        ]
        namespaces = Counter(worker.namespace for worker in found)
        self._namespace = max(namespaces, key=lambda each: namespaces[each], default="")
        decoders = [worker for worker in found if worker.namespace == self._namespace]
        self._cast = _Cast.of(decoders)
        self._decoders_at_first = len(decoders)
        # A beginning that no earlier run has sent: else nothing would be cold on a system that is up already.
        self._instructions = f"{secrets.token_hex(4)}. You answer questions about the text that you are given."
        self._reusable = 0  # tokens that each row must find; 0 until the first has left them

    def without_kills(self) -> list[DemoRow]:
        """Four rows. The first one fills the cache for all others."""
        first, near, far = (worker.worker_id for worker in (self._cast.first, self._cast.near, self._cast.far))
        cold = self._row("cold", CacheOptions(decode_worker=first), sources=frozenset())
        self._reusable = self._reusable_tokens(cold.result)
        time.sleep(SETTLE_S)
        return [
            cold,
            self._row_from("same_worker", first, CacheSource.DEVICE),
            self._row_from("shared_memory", near, CacheSource.SHARED_MEMORY),
            self._row_from("grpc", far, CacheSource.GRPC),
        ]

    def with_kills(self, kill: Kill) -> list[DemoRow]:
        """Two more rows; at the end the system is whole again."""
        first = self._cast.first
        node = next(node for node in self._client.status().store_nodes if node.node_id == first.store_node)
        self._report(f"kill -9 {first.pid} (decode worker)")
        kill(first)
        # From a store node: the one that `first` filled, or that of a prefill worker that helped it.
        stored = frozenset({CacheSource.SHARED_MEMORY, CacheSource.GRPC})
        rows = [self._row("after_worker_kill", CacheOptions(publish=False), sources=stored)]
        self._report(f"kill -9 {node.pid} (store node)")
        kill(node)
        self._wait_for("the store node", lambda now: any(_follows(each, node) for each in now.store_nodes))
        # Where each host has one worker, the killed one's replacement is the only one beside the node.
        self._wait_for("a worker beside it", self._beside_first)
        time.sleep(SETTLE_S)
        worker = self._beside_first(self._client.status())[0].worker_id
        rows.append(self._row_from("after_store_restart", worker, CacheSource.SHARED_MEMORY))
        self._wait_for("the killed worker's replacement", self._is_whole)
        return rows

    def _row_from(self, path: str, worker: str, source: CacheSource) -> DemoRow:
        """Ask this worker to take what it can from this source alone. Nothing is left behind, so that the next path
        finds on the worker what this one found."""
        cache = CacheOptions(sources=frozenset({source}), publish=False, decode_worker=worker)
        return self._row(path, cache, sources=cache.sources)

    def _row(self, path: str, cache: CacheOptions, *, sources: frozenset[CacheSource]) -> DemoRow:
        """Ask by the path, then the same question cold, where the last answer was given. From these sources and no
        others must have come what was cached; without one the question is asked once, since it is cold only once."""
        answers: list[GenerateResult] = []
        as_meant = False
        while not as_meant and len(answers) < (ATTEMPTS if sources else 1):
            time.sleep(ATTEMPT_EVERY_S if answers else 0.0)
            answers.append(self._ask(path, cache))
            usage = answers[-1].usage
            cached = {each: count for each, count in usage.cached.by_source().items() if count}
            if sources:
                as_meant = cached.keys() <= sources and sum(cached.values()) >= self._reusable
            else:
                as_meant = sum(cached.values()) <= TEMPLATE_SHARE_MAX * usage.prompt_tokens
        result = answers[-1]
        cold = self._ask(path, CacheOptions(sources=COLD.sources, publish=False, decode_worker=result.decode_worker))
        equal = all((each.token_ids, each.text) == (cold.token_ids, cold.text) for each in answers)
        title, attempts = self._cast.title(path, result), len(answers)
        row = DemoRow(path, title, result, equal_to_cold=equal, as_meant=as_meant, attempts=attempts)
        self._report(
            f"{row.title}: {result.usage.prompt_tokens:,} prompt tokens, cached "
            f"{cached_by_source(result.usage.cached)}, first token {result.ttft_ms:,.0f} ms, "
            f"bypassing the cache {cold.ttft_ms:,.0f} ms\n  {result.text.strip()!r}"
        )
        return row

    def _ask(self, path: str, cache: CacheOptions) -> GenerateResult:
        question = f"{self._shared.text}\n\nQuestion: {QUESTIONS[path]}"
        messages = [Message("system", self._instructions), Message("user", question)]
        return self._client.generate(messages, model=self.model, sampling=ANSWER, cache=cache)

    def _reusable_tokens(self, first: GenerateResult) -> int:
        """Full blocks before the question, at least: prompts differ from there on only. A lower bound, since the
        questions have different lengths."""
        longest_question_tokens = max(map(len, QUESTIONS.values()))
        reusable = (first.usage.prompt_tokens - longest_question_tokens) // self._block_tokens * self._block_tokens
        if reusable < self._shared.tokens_min:
            raise HeadraceError(f"the shared text has fewer than {self._shared.tokens_min} tokens with {self.model}")
        return reusable

    def _decoders(self, now: SystemStatus) -> list[WorkerStatus]:
        return [worker for worker in now.workers if worker.role != "prefill" and worker.namespace == self._namespace]

    def _beside_first(self, now: SystemStatus) -> list[WorkerStatus]:
        """Other workers that share memory with the store node that `first` filled."""
        first = self._cast.first
        return [
            worker
            for worker in self._decoders(now)
            if worker.store_node == first.store_node and worker.worker_id != first.worker_id
        ]

    def _is_whole(self, now: SystemStatus) -> bool:
        left = {worker.worker_id for worker in self._decoders(now)} - {self._cast.first.worker_id}
        return len(left) >= self._decoders_at_first

    def _wait_for(self, what: str, is_back: Callable[[SystemStatus], object]) -> None:
        give_up_at = time.monotonic() + RECOVERY_TIMEOUT_S
        self._report(f"waiting for {what}")
        while not is_back(self._client.status()):
            if time.monotonic() > give_up_at:
                raise WorkerUnavailable("", f"{what} did not come back within {RECOVERY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


def _follows(node: StoreNodeStatus, killed: StoreNodeStatus) -> bool:
    return node.node_id == killed.node_id and node.incarnation > killed.incarnation
