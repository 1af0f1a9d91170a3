"""What a bad link to a store node costs a request: first tokens cold, warm, and warm behind links that fail.

    python benchmarks/bad_links.py [--model NAME] [--tokens 33,129] [--patience-ms 5,20] [--rounds N] [--seconds N]

A real worker reads from a real store node in a process of its own, by gRPC through a TCP proxy, which is good until it
is told otherwise. In each round a prompt is loaded warm and behind each fault, in turn, and computed cold right before
each of these, so that what else the machine does is in both. The promise for an answer is 1.05 times its own cold one
and a round trip, as the worker knew it: what it measured lately, and not less than the patience. `of promise` is the
median over the rounds, `over` the share beyond. In the row `cold`, one cold answer after another says what of that
is no fault of any link. `lost` is what the load itself cost: its seconds, less what computing the loaded tokens takes
by the worker's own fit; `may` is what the promise allows for by that fit. These two hold on a busy machine, too.
`loaded` is the share of the prompt that was loaded all the same; what is missing of it in the row `warm` was left for
nothing. All answers must be the same bits. Prints; judges nothing.
"""

import argparse
import asyncio
import json
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from statistics import median

from headrace.config import EngineSettings, ModelSettings, StoreSettings
from headrace.core.block import CacheSource, HashAlgorithm, hash_prompt
from headrace.core.clock import Deadline, SystemClock
from headrace.core.generation import (
    AttemptId,
    CacheControl,
    DecodeCall,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenDelta,
    WorkerId,
)
from headrace.core.members import StoreNodeRecord, WorkerRole
from headrace.core.overtake_limits import OVERTAKE_ROUND_TRIP_MIN_MS, OVERTAKE_SHARE, ROUND_TRIPS_KNOWN
from headrace.decode.decode_tokens import decode_tokens
from headrace.engine.engine import Engine
from headrace.engine.load_model import load_model
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.memory_index import MemoryMembership
from headrace.index.redis_membership import RedisMembership
from headrace.transfer.hold_prefix import hold_prefix
from headrace.transfer.store_nodes import StoreNodeTable
from headrace.transfer.worker import Worker
from headrace.transfer.worker_member import WorkerPlace
from headrace.verify.store_process import StoreProcess

CLOCK = SystemClock()
BLOCK_TOKENS = 16
FAR = frozenset({CacheSource.GRPC})
COLD, STORE, WARM = (
    CacheControl(sources=frozenset(), publish=False),
    CacheControl(sources=frozenset(), publish=True),
    CacheControl(sources=FAR, publish=False),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What the link does to bytes from the node, once so many of them have passed."""

    name: str
    after_share: float  # of the payload
    pause_s: float = 0.0  # once
    bytes_per_s: float = float("inf")


SILENT_S = 3_600.0


def faults(payload_bytes: int, cold_s: float) -> list[Fault]:
    """Links that are worth leaving, and some that are not, for a prompt of this size."""
    return [
        Fault("silent", 0.0, pause_s=SILENT_S),
        Fault("stalls half-way", 0.5, pause_s=SILENT_S),
        Fault("pauses 0.2 s", 0.0, pause_s=0.2),
        Fault("pauses 0.2 s half-way", 0.5, pause_s=0.2),
        Fault("takes half of cold", 0.0, bytes_per_s=payload_bytes / (0.5 * cold_s)),
        Fault("takes thrice cold", 0.0, bytes_per_s=payload_bytes / (3 * cold_s)),
        Fault("drips", 0.0, bytes_per_s=payload_bytes / (100 * cold_s)),
    ]


class Link:
    """A TCP proxy on a thread and loop of its own."""

    def __init__(self, target: str) -> None:
        self._target = target.rsplit(":", 1)
        self._loop = asyncio.new_event_loop()
        self._good_bytes, self._pause_s, self._rate = float("inf"), 0.0, float("inf")
        self._mended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._connected, "127.0.0.1", 0, limit=65_536), self._loop
        ).result()
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def spoil(self, fault: Fault, payload_bytes: int) -> None:
        """From here on the link has this fault."""
        self._call(self._set, fault.after_share * payload_bytes, fault.pause_s, fault.bytes_per_s)

    def mend(self) -> None:
        """The link is good, and what it held back comes at once."""
        self._call(self._set, float("inf"), 0.0, float("inf"))

    def _call(self, function, *args) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(*args), done.set()))
        done.wait()

    def _set(self, good_bytes: float, pause_s: float, rate: float) -> None:
        self._good_bytes, self._pause_s, self._rate = good_bytes, pause_s, rate
        if good_bytes == float("inf"):
            self._mended.set()
        else:
            self._mended = asyncio.Event()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_node, to_node = await asyncio.open_connection(self._target[0], int(self._target[1]))
        await asyncio.gather(self._carry(reader, to_node, is_slow=False), self._carry(from_node, writer, is_slow=True))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_slow: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                if is_slow:
                    await self._hold_back(len(data))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _hold_back(self, num_bytes: int) -> None:
        self._good_bytes -= num_bytes
        if self._good_bytes >= 0:
            return
        wait_s, self._pause_s = self._pause_s + num_bytes / self._rate, 0.0
        if wait_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._mended.wait()


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    tokens: tuple[tuple[int, float], ...]  # with log-probabilities, which stand for the bits of the logits
    cached_tokens: int
    lost_s: float  # by loading, less what that saved
    may_lose_s: float


class Bench:
    """One worker that reads through the link."""

    def __init__(self, worker: Worker, link: Link, node_id: str) -> None:
        self.worker = worker
        self.link = link
        self._node_id = node_id

    @property
    def round_trip_s(self) -> float:
        """What the way to the node is given for its first block now."""
        return self.worker.timed_nodes.times.round_trip_s([(self._node_id, CacheSource.GRPC)])

    def be_patient(self, patience_s: float) -> None:
        """From here on nothing is given less."""
        self.worker.timed_nodes.times.patience_s = patience_s

    @asynccontextmanager
    async def loading(self, token_ids: Sequence[int]) -> AsyncIterator[None]:
        """Loads of this prompt into blocks of their own, one after the other, for the length of the scope."""

        async def load() -> None:
            while True:
                async with hold_prefix(
                    self.worker,
                    self._request(token_ids, WARM),
                    num_blocks=len(token_ids) // BLOCK_TOKENS + 1,
                    reusable_blocks=(len(token_ids) - 1) // BLOCK_TOKENS,
                    hint_nodes=(self._node_id,),
                    deadline=Deadline.after(10, CLOCK),
                ):
                    pass

        loading = asyncio.create_task(load())
        try:
            yield
        finally:
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading

    async def ask(self, token_ids: Sequence[int], cache: CacheControl) -> Answer:
        request = self._request(token_ids, cache)
        call = DecodeCall(
            attempt_id=AttemptId(secrets.token_hex(8)),
            request=request,
            worker_id=self.worker.worker_id,
            timeout_ms=60_000,
            computed_from=len(request.prompt.chain),
            hint_nodes=(self._node_id,),
        )
        fit, num_tokens = self.worker.engine.load().ahead.prefill, len(token_ids)
        may_lose_s = OVERTAKE_SHARE * float(fit.seconds(0, num_tokens)) + self.round_trip_s
        started_s, ttft_s, tokens = time.perf_counter(), 0.0, []
        async with aclosing(decode_tokens(call, self.worker)) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    ttft_s = ttft_s or time.perf_counter() - started_s
                    tokens.append((event.token_id, event.logprob))
                else:
                    finished = event
        while self.worker.publisher.num_pending:  # noqa: ASYNC110 (a publisher has no event for this)
            await asyncio.sleep(0.005)
        cached = finished.usage.cached.total
        lost_s = finished.work.load_s - float(fit.seconds(0, num_tokens) - fit.seconds(cached, num_tokens))
        return Answer(ttft_s, tuple(tokens), cached, lost_s, may_lose_s)

    def _request(self, token_ids: Sequence[int], cache: CacheControl) -> GenerateRequest:
        model = self.worker.engine.model
        prompt = hash_prompt(
            model.namespace.id, token_ids, block_tokens=BLOCK_TOKENS, algorithm=model.namespace.hash_algorithm
        )
        sampling = SamplingParams(max_tokens=2, logprobs=1, ignore_eos=True)
        return GenerateRequest(RequestId("r"), model.name, prompt, sampling, cache)


@asynccontextmanager
async def running(model_name: str) -> AsyncIterator[Bench]:
    """A store node, the link to it, and a worker on what it takes for another host."""
    async with AsyncExitStack() as parts:
        valkey = EmbeddedValkey()
        redis_url = await asyncio.to_thread(valkey.start)
        parts.callback(valkey.stop)
        settings = StoreSettings(node_id=f"bench-{secrets.token_hex(4)}", arena_mb=256)
        parts.enter_context(StoreProcess(settings, redis_url=redis_url))
        node = await announced(redis_url, settings.node_id)
        link = Link(node.address)
        membership = MemoryMembership(CLOCK)
        await membership.announce(replace(node, address=link.address), ttl_ms=3_600_000)
        engine_settings = EngineSettings(block_tokens=BLOCK_TOKENS, pool_tokens=8_192)
        model = load_model(
            ModelSettings(model=model_name, device="cpu", torch_threads=1),
            engine_settings,
            trust_group="bench",
            hash_algorithm=HashAlgorithm.XXH3_128,
            report=lambda line: None,
        )
        table = StoreNodeTable(host="elsewhere", membership=membership, clock=CLOCK, report_fault=lambda fault: None)
        worker = Worker(
            WorkerPlace(WorkerId("far"), WorkerRole.BOTH, host="elsewhere"),
            Engine(model, engine_settings, clock=CLOCK),
            nodes=table,
            node_table=table,
            membership=membership,
            clock=CLOCK,
            report_fault=lambda fault: None,
        )
        await worker.start()
        parts.push_async_callback(worker.stop)
        yield Bench(worker, link, node.node_id)


async def announced(redis_url: str, node_id: str) -> StoreNodeRecord:
    membership = RedisMembership(redis_url, clock=CLOCK)
    try:
        async with asyncio.timeout(30):
            while True:
                for record in await membership.store_nodes():
                    if record.node_id == node_id:
                        return record
                await asyncio.sleep(0.05)
    finally:
        await membership.close()


@dataclass(frozen=True, slots=True)
class Trial:
    """An answer, and the cold one right before it."""

    cold: Answer
    answer: Answer
    round_trip_s: float

    @property
    def of_promise(self) -> float:
        return self.answer.ttft_s / ((1 + OVERTAKE_SHARE) * self.cold.ttft_s + self.round_trip_s)


async def measure(
    bench: Bench, num_tokens: int, *, patiences_ms: Sequence[int], rounds: int, end_s: float
) -> list[dict[str, object]]:
    """All links for prompts of one length, round by round; each patience in turn."""
    token_ids = [100 + (position * 31 + num_tokens) % 900 for position in range(num_tokens)]
    payload_bytes = (num_tokens - 1) // BLOCK_TOKENS * bench.worker.layout.block_bytes
    (stored, *_) = [await bench.ask(token_ids, STORE) for _ in range(3)]
    for _ in range(ROUND_TRIPS_KNOWN + 1):
        await bench.ask(token_ids, WARM)
    cold_s = median([(await bench.ask(token_ids, COLD)).ttft_s for _ in range(3)])
    found: dict[tuple[int, str], list[Trial]] = defaultdict(list)
    for _ in range(rounds):
        if time.monotonic() > end_s and found:
            break
        for patience_ms in patiences_ms:
            bench.be_patient(patience_ms / 1000)
            for link in ("cold", "cold, beside loads", "warm", *faults(payload_bytes, cold_s)):
                trial = await one_trial(bench, token_ids, link, payload_bytes)
                found[patience_ms, link if isinstance(link, str) else link.name].append(trial)
    answers = [answer for trials in found.values() for trial in trials for answer in (trial.cold, trial.answer)]
    assert all(answer.tokens == stored.tokens for answer in answers), "an answer differs"
    return [summary(num_tokens, patience_ms, link, trials) for (patience_ms, link), trials in found.items()]


async def one_trial(bench: Bench, token_ids: Sequence[int], link: str | Fault, payload_bytes: int) -> Trial:
    cold = await bench.ask(token_ids, COLD)
    round_trip_s = bench.round_trip_s
    if isinstance(link, Fault):
        bench.link.spoil(link, payload_bytes)
        answer = await bench.ask(token_ids, WARM)
        bench.link.mend()
        await asyncio.sleep(0.02)
        await bench.ask(token_ids, WARM)  # the link is known as it is when it is good
    elif link == "cold, beside loads":
        async with bench.loading(token_ids):
            answer = await bench.ask(token_ids, COLD)
    else:
        answer = await bench.ask(token_ids, COLD if link == "cold" else WARM)
    return Trial(cold, answer, round_trip_s)


def summary(num_tokens: int, patience_ms: int, link: str, trials: Sequence[Trial]) -> dict[str, object]:
    answers = [trial.answer for trial in trials]
    return {
        "tokens": num_tokens,
        "patience_ms": patience_ms,
        "link": link,
        "count": len(trials),
        "ttft_ms_p50": 1e3 * median(answer.ttft_s for answer in answers),
        "of_cold_p50": median(trial.answer.ttft_s / trial.cold.ttft_s for trial in trials),
        "round_trip_ms_p50": 1e3 * median(trial.round_trip_s for trial in trials),
        "of_promise_p50": median(trial.of_promise for trial in trials),
        "over": sum(trial.of_promise > 1 for trial in trials) / len(trials),
        "lost_ms_p50": 1e3 * median(answer.lost_s for answer in answers),
        "may_lose_ms_p50": 1e3 * median(answer.may_lose_s for answer in answers),
        "lost_over_ms_max": 1e3 * max(answer.lost_s - answer.may_lose_s for answer in answers),
        "loaded_share": sum(answer.cached_tokens for answer in answers) / len(answers) / num_tokens,
    }


async def run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    end_s, rows = time.monotonic() + arguments.seconds, []
    patiences_ms = list(map(int, arguments.patience_ms.split(",")))
    async with running(arguments.model) as bench:
        for num_tokens in map(int, arguments.tokens.split(",")):
            rows += await measure(bench, num_tokens, patiences_ms=patiences_ms, rounds=arguments.rounds, end_s=end_s)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ModelSettings().model)
    parser.add_argument("--tokens", default="33,65,129,257,513", help="lengths of prompts")
    parser.add_argument(
        "--patience-ms", default=str(OVERTAKE_ROUND_TRIP_MIN_MS), help="as the setting load_patience_ms"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no round after so long")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows = asyncio.run(run(arguments))
    load = {"before": load_before, "after": os.getloadavg()[0], "cores": os.cpu_count()}
    if arguments.json:
        print(json.dumps({"rows": rows, "machine_load": load}))
        return
    heads = "tokens patience                  link count  ttft p50 of cold  trip of promise  over loaded  lost p50  may"
    print(f"{heads}  worst over")
    for row in rows:
        print(
            f"{row['tokens']:>6} {row['patience_ms']:>5} ms {row['link']:>21} {row['count']:>5}"
            f" {row['ttft_ms_p50']:>6.0f} ms {row['of_cold_p50']:>7.2f} {row['round_trip_ms_p50']:>5.1f}"
            f" {row['of_promise_p50']:>10.2f} {row['over']:>5.0%} {row['loaded_share']:>6.0%}"
            f" {row['lost_ms_p50']:>6.1f} ms {row['may_lose_ms_p50']:>4.1f} {row['lost_over_ms_max']:>+8.1f} ms"
        )
    print(f"load of the machine: {load['before']:.1f} before, {load['after']:.1f} after, on {load['cores']} cores")


if __name__ == "__main__":
    main()
