"""`headrace bench engine`: what a prompt and a decode step take, ours beside plain transformers, in one run.

Owns which work is measured and in what order: rounds over all rows, ours and transformers' in turn, so that other work
on the machine hits both alike; medians. Ours are steps as the step thread runs them, in chunks of the configured size,
with the choice of the likeliest token; scheduling, text and transport are not in them. Judges nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from headrace.bench.engine_report import EngineReport, EngineRow
from headrace.bench.plain_transformers import PlainTransformers
from headrace.bench.vllm_peer import VLLM_NEW_TOKENS_MAX, VllmPeer, running_vllm
from headrace.config import Config
from headrace.core.block import HashAlgorithm
from headrace.diagnose.diagnose_model import model_work
from headrace.diagnose.measure_machine import measure_bytes_per_s
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.lone_sequence import LonePool, LoneSequence
from headrace.engine.thread_choice import SETTLING_STEPS

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int  # decode steps of one trial
    rounds: int
    round_s_max: float  # work whose first trial took longer (ours and transformers' together) is not done again


FULL = Extent((256, 1_024, 4_096), (1, 4, 8, 16), (128, 1_024), steps=8, rounds=3, round_s_max=12.0)
QUICK = Extent((256, 1_024), (1, 8), (128, 1_024), steps=4, rounds=2, round_s_max=4.0)


@dataclass(slots=True)
class _Work:
    """One row under way. Trials return seconds: of a whole prompt, or of one decode step."""

    what: str
    batch: int
    context: int
    ours: Callable[[], float]
    theirs: Callable[[], float]
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    vllm_s: list[float] = field(default_factory=list)
    took_s: float = 0.0

    def run_once(self, vllm: VllmPeer | None) -> None:
        """One trial of each, in turn."""
        started_s = time.perf_counter()
        self.ours_s.append(self.ours())
        if vllm is not None:
            self.vllm_s.append(vllm.trial(self.what, self.batch, self.context))
        self.theirs_s.append(self.theirs())
        self.took_s = time.perf_counter() - started_s

    def figure(self, seconds: float) -> float:
        return self.context / seconds if self.what == "prefill" else seconds * 1e3

    @property
    def place(self) -> str:
        return f"{self.context:,} tokens" if self.what == "prefill" else f"batch {self.batch}, context {self.context:,}"


def measure_engine(config: Config, *, report: Report, extent: Extent = FULL, peer_python: str = "") -> EngineReport:
    """Load the configured model twice, ours and transformers', and measure both; some minutes on CPU. Blocks.

    Work that the model's context does not hold is left out. peer_python: an interpreter that imports vllm; empty: none.
    Raises what `load_model` raises, and InvalidRequest for the peer.
    """
    started_s = time.perf_counter()
    model = _load(config, extent, report)
    threads, device = model.runner.threads, model.kv.device
    report("loading it as transformers runs it")
    plain = PlainTransformers(model.path, dtype=model.runner.model.dtype, device=device, threads=threads)
    limit = model.context_tokens_max - extent.steps - 2
    chunk = config.engine.prefill_chunk_tokens
    works = [_prefill(model, plain, tokens, chunk) for tokens in extent.prompts if tokens <= limit]
    for context in (context for context in extent.contexts if context <= limit):
        works += [_decode(model, plain, batch, context, extent.steps) for batch in extent.batches]
    context_to_again_s: dict[int, list[float]] = {}
    with _peer(peer_python, model, works, report) as vllm:
        for number in range(extent.rounds):
            for work in works:
                if number == 0 or work.took_s <= extent.round_s_max:
                    work.run_once(vllm)
                    report(_progress(work, number, extent.rounds))
            for context in sorted({work.context for work in works if work.what == "decode"}):
                context_to_again_s.setdefault(context, []).append(plain.recompute(context))
    report("measuring how fast memory is read")
    read_bytes_per_s = max(_read_rates(device, threads))
    weight_bytes = model_work(model).step_bytes
    return EngineReport(
        model=model.name,
        dtype=model.kv.layout.dtype,
        threads=threads,
        exact=model.exact,
        rows=tuple(_row(work, context_to_again_s) for work in works),
        weight_bytes=weight_bytes,
        read_bytes_per_s=read_bytes_per_s,
        vllm=vllm.version if vllm else "",
        seconds=time.perf_counter() - started_s,
    )


def _peer(
    python: str, model: LoadedModel, works: Sequence[_Work], report: Report
) -> AbstractContextManager[VllmPeer | None]:
    """Loaded before anything is measured, so that a peer that fails costs no measurement. Empty: none."""
    if not python:
        return nullcontext()
    report("vLLM: loading")
    return running_vllm(
        python,
        model.path,
        dtype=model.kv.layout.dtype,
        threads=model.runner.threads,
        tokens_max=max(work.context for work in works) + VLLM_NEW_TOKENS_MAX,
        batch_max=max(work.batch for work in works),
    )


def _load(config: Config, extent: Extent, report: Report) -> LoadedModel:
    """With a pool for the largest batch at the longest context, and for the longest prompt."""
    block = config.engine.block_tokens
    decoding = max(extent.batches) * (max(extent.contexts) + max(extent.steps, SETTLING_STEPS) + 2 * block)
    wanted = max(decoding, max(extent.prompts, default=0) + 2 * block)
    return load_model(
        config.model,
        replace(config.engine, pool_tokens=-(-wanted // block) * block, batch_sequences_max=max(extent.batches)),
        trust_group=config.gateway.trust_group,
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=report,
    )


def _prefill(model: LoadedModel, plain: PlainTransformers, tokens: int, chunk: int) -> _Work:
    def ours() -> float:
        started_s = time.perf_counter()
        _compute_prompt(model, tokens, chunk)
        return time.perf_counter() - started_s

    return _Work("prefill", 1, tokens, ours, lambda: plain.prefill(tokens))


def _compute_prompt(model: LoadedModel, tokens: int, chunk: int) -> None:
    """In steps as a worker takes them."""
    vocab_size = model.runner.model.config.vocab_size
    prompt = [(7_919 * position + 1) % vocab_size for position in range(tokens)]
    for step in LoneSequence(LonePool(model)).steps(prompt, rows=chunk):
        model.runner.run_step([step])


def _decode(model: LoadedModel, plain: PlainTransformers, batch: int, context: int, steps: int) -> _Work:
    prepared: list[Callable[[], float]] = []
    settled: list[bool] = []

    def decode(num_steps: int) -> None:
        # The KV of the context is whatever the pool holds: any numbers take as long as any others.
        tokens, pool = [1] * batch, LonePool(model)
        sequences = [LoneSequence(pool, begin=context) for _ in range(batch)]
        for _ in range(num_steps):
            parts = [each.step((token,), num_logits=1) for each, token in zip(sequences, tokens, strict=True)]
            tokens = model.runner.run_step(parts).argmax(dim=-1).tolist()

    def ours() -> float:
        if not settled:
            settled.append(True)
            decode(SETTLING_STEPS)  # on how many threads such steps run is tried first
        started_s = time.perf_counter()
        decode(steps)
        return (time.perf_counter() - started_s) / steps

    def theirs() -> float:
        if not prepared:
            prepared.append(plain.decoder(batch, context, steps))
        return prepared[0]()

    return _Work("decode", batch, context, ours, theirs)


def _progress(work: _Work, number: int, rounds: int) -> str:
    ours, theirs = work.figure(work.ours_s[-1]), work.figure(work.theirs_s[-1])
    unit = "tokens/s" if work.what == "prefill" else "ms a step"
    return f"round {number + 1} of {rounds}: {work.what}, {work.place}: {ours:,.1f} {unit}, transformers {theirs:,.1f}"


def _read_rates(device: torch.device, threads: int) -> Iterator[float]:
    """On one thread and on all that are configured."""
    previous = torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        yield measure_bytes_per_s(device)
    torch.set_num_threads(previous)


def _row(work: _Work, context_to_again_s: dict[int, list[float]]) -> EngineRow:
    again_s = context_to_again_s.get(work.context) if work.what == "decode" else None
    return EngineRow(
        what=work.what,
        batch=work.batch,
        context=work.context,
        ours=work.figure(median(work.ours_s)),
        transformers=work.figure(median(work.theirs_s)),
        no_cache=work.figure(median(again_s) * work.batch) if again_s else None,
        no_cache_is_extrapolated=again_s is not None and work.batch > 1,
        vllm=work.figure(median(work.vllm_s)) if work.vllm_s else None,
        unit="tokens/s" if work.what == "prefill" else "ms/step",
    )
