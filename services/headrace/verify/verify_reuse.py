"""The check itself: the same prompts by every path, compared with the cold run token by token and bit by bit.

Starts its own index and store node and two workers in this process, each with weights and pool of its own, so that
what one worker computed reaches the other only by the path under test. No Ray. Each run is alone on its worker, so the
digest of all its logits can be compared. A path counts only when it reused what it promises to reuse.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from headrace.compose import Worker, join_worker, prepare_model
from headrace.config import Config
from headrace.core.block import CacheSource, HashAlgorithm, HashedPrompt, HolderId, hash_prompt
from headrace.core.clock import Deadline, SystemClock
from headrace.core.errors import ConfigInvalid, InvalidRequest, ModelRefused
from headrace.core.generation import (
    AttemptId,
    CacheControl,
    DecodeCall,
    Finished,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenDelta,
    Usage,
    WorkerId,
)
from headrace.core.limits import MEMBER_REFRESH_MS, REQUEST_TIMEOUT_MS_MAX
from headrace.core.members import WorkerRole
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.model_runner import ModelRunner
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.redis_index import RedisIndex
from headrace.index.redis_membership import RedisMembership
from headrace.verify.library_text import code_tokens, cut
from headrace.verify.measure_kv_cache import COMPARED_TOKENS, measure_kv_cache
from headrace.verify.plot_report import plot_report
from headrace.verify.recording_runner import RecordingRunner
from headrace.verify.report import PathRun, VerifyReport
from headrace.verify.store_process import StoreProcess
from headrace.verify.verify_together import verify_together

Report = Callable[[str], None]

# The longest prompt: long enough that computing it takes a second or more and loading it clearly less.
PROMPT_TOKENS_MAX = 1_024
# The prompt before which KV cache and none are compared; the published figure's text is of this order.
COMPARED_PROMPT_TOKENS = 256
COMPANY_TOKENS = 1_024
LOAD_PATIENCE_MS = 10_000
# Publication goes on behind the stream's end, and re-registration behind a restart; both take well under a second.
SETTLE_TIMEOUT_S = 60.0
POLL_S = 0.05
WORKER_A, WORKER_B = WorkerId("verify-a"), WorkerId("verify-b")


def verify_reuse(config: Config, *, generated_tokens: int, plot: Path, report: Report) -> VerifyReport:
    """Run the whole check; minutes for a real model on CPU. Blocks. Writes the plot.

    Raises ModelRefused, ConfigInvalid, InvalidRequest (a context too short for any prompt). What differs is not an
    error here but in the report.
    """
    if config.engine.store_codec != "raw":
        raise ConfigInvalid(
            "store_codec",
            "reuse through a lossy codec is not bit-equal, so there is nothing to show; measure what it loses: "
            f"headrace verify --codec {config.engine.store_codec}",
        )
    prepare_model(config.model, report=report)
    first = _load(config, generated_tokens, report)
    bench_prompt = _tokens(first, 0, _compared_prompt_tokens(first))
    chunk_tokens = config.engine.prefill_chunk_tokens
    kv_cache = measure_kv_cache(first, bench_prompt, chunk_tokens=chunk_tokens, report=report)
    company = _tokens(first, 0, COMPANY_TOKENS)
    together = verify_together(first, config.engine, company, report=report)
    report("loading the model a second time, for the second worker")
    second = _load(config, generated_tokens, report)
    differing = first.namespace.differing_fields(second.namespace)
    if differing:
        raise ModelRefused(first.name, f"two loads of it differ in {', '.join(differing)}, so workers could not share")
    runs = asyncio.run(_run_paths(config, first, second, generated_tokens, report))
    found = VerifyReport(
        model=first.name,
        exact_claimed=first.exact,
        generated_tokens=min(run.generated_tokens for path in runs.values() for run in path),
        runs=runs,
        kv_cache=kv_cache,
        together=together,
        plot=str(plot),
    )
    plot_report(found, plot)
    return found


def _load(config: Config, generated_tokens: int, report: Report) -> LoadedModel:
    """A pool with room for all runs that a worker remembers, instead of a serving worker's gigabyte."""
    needed = 3 * (PROMPT_TOKENS_MAX + generated_tokens) + COMPARED_PROMPT_TOKENS + COMPARED_TOKENS
    pool_tokens = needed + 8 * config.engine.block_tokens
    return load_model(
        config.model,
        replace(config.engine, pool_tokens=pool_tokens),
        trust_group=config.gateway.trust_group,
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=report,
    )


def _compared_prompt_tokens(model: LoadedModel) -> int:
    room = model.context_tokens_max - COMPARED_TOKENS
    if room < 1:
        raise InvalidRequest(f"a context of {model.context_tokens_max} has no room for {COMPARED_TOKENS} new tokens")
    return min(COMPARED_PROMPT_TOKENS, room)


def _tokens(model: LoadedModel, offset: int, num_tokens: int) -> list[int]:
    """Real text that is always there: the source of this library's own core, from some token on."""
    return cut(code_tokens(Tokenizer.from_file(str(model.path / "tokenizer.json"))), offset, num_tokens)


def _prompts(model: LoadedModel, generated_tokens: int) -> list[HashedPrompt]:
    """The longest first. Lengths at the edges of blocks: within one, exactly at its end, one token beyond it."""
    block_tokens = model.kv.layout.block_tokens
    blocks = min(PROMPT_TOKENS_MAX, model.context_tokens_max - generated_tokens) // block_tokens
    if blocks < 2:
        raise InvalidRequest(
            f"a context of {model.context_tokens_max} has no room for two blocks of {block_tokens} and "
            f"{generated_tokens} new tokens; use smaller --block-tokens or --tokens"
        )
    lengths = [(blocks - 1) * block_tokens + block_tokens // 2, max(1, blocks // 2) * block_tokens, block_tokens + 1]
    # Different beginnings, so that no prompt finds another's blocks.
    return [
        hash_prompt(
            model.namespace.id,
            _tokens(model, 1 + 1_009 * number, length),
            block_tokens=block_tokens,
            algorithm=model.namespace.hash_algorithm,
        )
        for number, length in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One run: what it said, and the digest of all logits that it was chosen from."""

    token_ids: tuple[int, ...]
    digest: str
    ttft_ms: float
    usage: Usage


@dataclass(frozen=True, slots=True)
class _TestWorker:
    worker_id: WorkerId
    worker: Worker
    recorder: RecordingRunner

    async def answer(
        self, prompt: HashedPrompt, *, cache: CacheControl, max_tokens: int, hint_nodes: tuple[str, ...] = ()
    ) -> _Answer:
        """Run one prompt alone, greedily, without stopping at an end-of-text token."""
        call = DecodeCall(
            attempt_id=AttemptId(secrets.token_hex(8)),
            request=GenerateRequest(
                request_id=RequestId("verify"),
                model="",
                prompt=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                cache=cache,
            ),
            worker_id=self.worker_id,
            timeout_ms=REQUEST_TIMEOUT_MS_MAX,
            computed_from=len(prompt.chain),
            hint_nodes=hint_nodes,
        )
        self.recorder.take_digest()
        started_s, first_s, tokens, usage = time.perf_counter(), 0.0, [], None
        async with aclosing(self.worker.decode(call)) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    first_s = first_s or time.perf_counter()
                    tokens.append(event.token_id)
                elif isinstance(event, Finished):
                    usage = event.usage
        assert usage is not None, "a stream that does not raise ends with Finished"
        return _Answer(tuple(tokens), self.recorder.take_digest(), (first_s - started_s) * 1e3, usage)


@dataclass(frozen=True, slots=True)
class _World:
    """Everything that runs: an index, a store node process, two workers."""

    a: _TestWorker
    b: _TestWorker
    store: StoreProcess
    node_id: str
    index: RedisIndex
    membership: RedisMembership

    async def wait_until_stored(self, prompt: HashedPrompt) -> None:
        """Until the node says that it holds every full block of the prompt. Raises DeadlineExceeded."""
        holder = HolderId(f"node:{self.node_id}")

        async def is_stored() -> bool:
            return (await self.index.longest_prefix(prompt.namespace, prompt.chain)).of(holder) == len(prompt.chain)

        await _poll(is_stored, "publish a prompt to the store node")

    async def restart_store(self) -> None:
        """Kill the node's process, start it again, and wait until both workers have seen the new one."""
        await asyncio.to_thread(self.store.kill)
        await asyncio.to_thread(self.store.start)

        async def is_seen() -> bool:
            return self.store.incarnation in {node.incarnation for node in await self.membership.store_nodes()}

        await _poll(is_seen, "see the store node again")
        await asyncio.sleep(2 * MEMBER_REFRESH_MS / 1000)  # workers read the members at this interval


async def _poll(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for something that announces itself to nobody here. Raises DeadlineExceeded."""
    async with Deadline.after(SETTLE_TIMEOUT_S, SystemClock()).scope(what):
        while not await holds():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _build_world(config: Config, first: LoadedModel, second: LoadedModel, arena_mb: int) -> AsyncIterator[_World]:
    async with AsyncExitStack() as parts:
        valkey = EmbeddedValkey()
        redis_url = await asyncio.to_thread(valkey.start)
        parts.callback(valkey.stop)
        # An own name: a store node of a running system on this host must not be touched.
        store_settings = replace(
            config.store, node_id=f"verify-{secrets.token_hex(4)}", arena_mb=arena_mb, store_port=0
        )
        own = replace(
            config,
            # What is compared is what was reused, however fast the model computes.
            engine=replace(config.engine, load_patience_ms=LOAD_PATIENCE_MS),
            store=store_settings,
            index=replace(config.index, redis_url=redis_url),
        )
        store = parts.enter_context(StoreProcess(store_settings, redis_url=redis_url))
        clock = SystemClock()
        index, membership = RedisIndex(redis_url, clock=clock), RedisMembership(redis_url, clock=clock)
        parts.push_async_callback(index.close)
        parts.push_async_callback(membership.close)
        workers = []
        for worker_id, model in ((WORKER_A, first), (WORKER_B, second)):
            recorder = RecordingRunner(model.runner)
            recorded = replace(model, runner=cast(ModelRunner, recorder))
            worker = join_worker(recorded, own, role=WorkerRole.BOTH, worker_id=worker_id)
            await worker.start()
            parts.push_async_callback(worker.stop)
            workers.append(_TestWorker(worker_id, worker, recorder))
        yield _World(workers[0], workers[1], store, store_settings.node_id, index, membership)


async def _run_paths(
    config: Config, first: LoadedModel, second: LoadedModel, generated_tokens: int, report: Report
) -> dict[str, list[PathRun]]:
    prompts = _prompts(first, generated_tokens)
    token_bytes = first.kv.layout.token_bytes
    stored_bytes = sum(len(prompt.token_ids) + generated_tokens for prompt in prompts) * token_bytes
    arena_mb = 64 + 2 * stored_bytes // 2**20  # room for headers, and so that nothing is evicted
    async with _build_world(config, first, second, arena_mb) as world:
        return await _Comparison(world, prompts, generated_tokens, report).run()


class _Comparison:
    """Runs the paths in order and compares each answer with the first, cold one of its prompt."""

    def __init__(self, world: _World, prompts: Sequence[HashedPrompt], generated_tokens: int, report: Report) -> None:
        self._world = world
        self._prompts = prompts
        self._generated_tokens = generated_tokens
        self._report = report
        self._references: list[_Answer] = []

    async def run(self) -> dict[str, list[PathRun]]:
        world = self._world
        cold = CacheControl(sources=frozenset(), publish=True)
        for prompt in self._prompts:
            self._report(f"computing {len(prompt.token_ids)} tokens on worker a, and publishing them")
            self._references.append(await world.a.answer(prompt, cache=cold, max_tokens=self._generated_tokens))
            await world.wait_until_stored(prompt)
        runs = {
            "cold": await self._path("cold", world.b, None),
            "in_process": await self._path("in_process", world.a, CacheSource.DEVICE),
            "shared_memory": await self._path("shared_memory", world.b, CacheSource.SHARED_MEMORY),
            "grpc": await self._path("grpc", world.b, CacheSource.GRPC),
        }
        self._report("killing the store node and starting it again")
        await world.restart_store()
        runs["after_store_restart"] = await self._path("after_store_restart", world.b, CacheSource.SHARED_MEMORY)
        return runs

    async def _path(self, name: str, worker: _TestWorker, source: CacheSource | None) -> list[PathRun]:
        """Every prompt by one path. Nothing is left behind on the worker, so that the next path starts from nothing."""
        cache = CacheControl(sources=frozenset() if source is None else frozenset({source}), publish=False)
        runs = []
        for prompt, reference in zip(self._prompts, self._references, strict=True):
            answer = await worker.answer(
                prompt, cache=cache, max_tokens=self._generated_tokens, hint_nodes=(self._world.node_id,)
            )
            run = _compare(prompt, source, answer, reference)
            self._report(
                f"{name}: {run.prompt_tokens} tokens, {run.cached.total} cached, first token {run.ttft_ms:.1f} ms, "
                f"{'equal' if run.token_equal and run.bit_equal else 'NOT EQUAL'}"
            )
            runs.append(run)
        return runs


def _compare(prompt: HashedPrompt, source: CacheSource | None, answer: _Answer, reference: _Answer) -> PathRun:
    """The last token is always computed, so a prompt of exactly k blocks reuses k - 1."""
    reusable = (len(prompt.token_ids) - 1) // prompt.block_tokens * prompt.block_tokens
    expected: dict[Any, int] = dict.fromkeys(CacheSource, 0)
    if source is not None:
        expected[source] = reusable
    return PathRun(
        prompt_tokens=answer.usage.prompt_tokens,
        generated_tokens=len(answer.token_ids),
        cached=answer.usage.cached,
        ttft_ms=answer.ttft_ms,
        token_equal=answer.token_ids == reference.token_ids,
        bit_equal=answer.digest == reference.digest,
        reused=answer.usage.cached.by_source() == expected,
    )
