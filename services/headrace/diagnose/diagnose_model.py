"""One model on one machine: how long its steps take, how long they would at least, and what that says.

Owns which steps are measured and how; the arithmetic is `core/model_work.py`'s, the sentences are `give_advice.py`'s.
Runs the engine's own model runner, in the calling thread, on blocks of a pool of its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from headrace.config import Config
from headrace.core.block import HashAlgorithm, KvCodec, KvLayout
from headrace.core.model_work import MachineLimits, ModelWork, Work
from headrace.diagnose.measure_machine import measure_machine
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.lone_sequence import LonePool, LoneSequence
from headrace.engine.thread_choice import SETTLING_STEPS

Report = Callable[[str], None]

PREFILL_TOKENS = (16, 64, 256)
DECODE_BATCHES = (1, 4, 8, 16)
DECODE_CONTEXTS = (128, 1_024)
CONTEXTS_SHOWN = (1_024, 4_096, 16_384, 65_536)
SEQUENCES_SHOWN = (1, 4, 16, 64)
STEPS_MEASURED = 7

CGROUP = Path("/sys/fs/cgroup")  # a container's own, version 2


@dataclass(frozen=True, slots=True)
class StepRow:
    """One kind of step: what it must do, and what it took (the median of STEPS_MEASURED)."""

    what: str  # "prefill" | "decode"
    batch: int
    tokens: int  # prefill: computed in the step; decode: context of each sequence
    work: Work
    least_ms: float
    measured_ms: float
    limit: str  # "bandwidth" | "compute": which of the two the least time comes from

    @property
    def ratio(self) -> float:
        """Measured over least."""
        return self.measured_ms / self.least_ms


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """So many sequences at once: how long each may be."""

    sequences: int
    kv_passes_weights_tokens: int | None  # from there on a step reads more KV than weights; None: never, for windows
    fit_tokens: int | None  # at which the machine's free memory is full of KV; None: never, for windows


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was measured of one model on one machine."""

    model: str
    dtype: str
    device: str
    threads: int
    limits: MachineLimits
    work: ModelWork
    context_tokens_max: int  # of one sequence
    num_experts: int  # of a layer; 1 where there are none
    int8_token_bytes: int | None  # of a token's KV in a pool of int8; None where it is coded already
    free_bytes: int  # for KV: free memory, the weights being loaded
    steps: tuple[StepRow, ...]
    compute_bound_batch: dict[int, float | None]  # context -> sequences, as ModelWork.compute_bound_batch
    memory: tuple[MemoryRow, ...]


def diagnose_model(config: Config, *, report: Report) -> Diagnosis:
    """Load the configured model and measure it; a minute or two on CPU. Blocks.

    Raises what `load_model` raises: ModelRefused, ConfigInvalid.
    """
    model = _load(config, report)
    work = model_work(model)
    report("measuring the machine: large products, and reading memory from end to end")
    threads = model.runner.threads
    limits = measure_machine(model.runner.model.dtype, model.kv.device, threads=threads)
    block_tokens = model.kv.layout.block_tokens
    context_max = min(model.context_tokens_max, model.kv.num_blocks * block_tokens // max(DECODE_BATCHES))
    rows_max = min(context_max, LonePool(model).step_rows(max(PREFILL_TOKENS)))
    steps = [_prefill_row(model, work, limits, tokens, report) for tokens in PREFILL_TOKENS if tokens <= rows_max]
    steps += [
        _decode_row(model, work, limits, batch, context, report)
        for context in DECODE_CONTEXTS
        if context + STEPS_MEASURED < context_max
        for batch in DECODE_BATCHES
    ]
    free_bytes = _free_bytes(model.kv.device) + model.kv.num_bytes
    room = free_bytes / model.layer_token_bytes
    return Diagnosis(
        model=model.name,
        dtype=model.kv.layout.dtype,
        device=model.kv.device.type,
        threads=threads,
        limits=limits,
        work=work,
        context_tokens_max=model.context_tokens_max,
        num_experts=_num_experts(model.runner.model.config),
        int8_token_bytes=_int8_token_bytes(model.kv.layout),
        free_bytes=free_bytes,
        steps=tuple(steps),
        compute_bound_batch={
            context: work.compute_bound_batch(context, limits)
            for context in (0, *CONTEXTS_SHOWN)
            if context <= model.context_tokens_max
        },
        memory=tuple(
            MemoryRow(
                sequences=sequences,
                kv_passes_weights_tokens=work.kv_passes_weights_tokens(sequences),
                fit_tokens=model.windows.fitting_tokens(room, sequences, block_tokens=block_tokens),
            )
            for sequences in SEQUENCES_SHOWN
        ),
    )


def model_work(model: LoadedModel) -> ModelWork:
    """Count the weights that steps multiply with, on a copy of the model without memory: the loaded one's are packed.

    Every matrix counts but the input embeddings, of which a step reads rows only. All experts count where there are
    some, though a step may use few of them.
    """
    config = AutoConfig.from_pretrained(model.path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    embedding_weights = {
        id(parameter)
        for module in empty.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    output = empty.get_output_embeddings().weight
    layer_weights = sum(
        parameter.numel()
        for parameter in empty.parameters()
        if parameter.dim() >= 2 and id(parameter) not in embedding_weights and parameter is not output
    )
    layout = model.kv.layout
    return ModelWork(
        layer_weights=layer_weights,
        output_weights=output.numel(),
        weight_bytes=torch.finfo(model.runner.model.dtype).bits // 8,
        layer_attention_width=config.get_text_config().num_attention_heads * layout.head_dim,
        layer_kv_bytes=model.layer_token_bytes,
        windows=model.windows,
    )


def different_tokens(count: int, *, vocab_size: int) -> tuple[int, ...]:
    """So many token ids, all different as far as the vocabulary goes: of a mixture of experts, equal ones would all be
    computed by the same few."""
    return tuple(number % vocab_size for number in range(1, count + 1))


def left_in_cgroup(cgroup: Path) -> int | None:
    """Bytes until a container's limit, those of files that the kernel keeps and gives up when they are needed counted
    as free; None: it has no limit."""
    limit = cgroup / "memory.max"
    if not limit.exists() or (max_bytes := limit.read_text(encoding="ascii").strip()) == "max":
        return None
    used_bytes = int((cgroup / "memory.current").read_text(encoding="ascii"))
    counts = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    kept_bytes = sum(int(counts[name]) for name in ("inactive_file", "active_file"))
    return max(0, int(max_bytes) - used_bytes + kept_bytes)


def _load(config: Config, report: Report) -> LoadedModel:
    """With a pool for the largest batch at the longest context, whatever a serving worker would have."""
    wanted = max(DECODE_BATCHES) * (max(DECODE_CONTEXTS) + 2 * config.engine.block_tokens)
    return load_model(
        config.model,
        replace(
            config.engine,
            pool_tokens=max(wanted, 2 * config.engine.block_tokens),
            batch_sequences_max=max(DECODE_BATCHES),
        ),
        trust_group=config.gateway.trust_group,
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=report,
    )


def _prefill_row(model: LoadedModel, work: ModelWork, limits: MachineLimits, tokens: int, report: Report) -> StepRow:
    token_ids = different_tokens(tokens, vocab_size=_vocab_size(model))

    def step(_: int) -> object:
        return model.runner.run_step([LoneSequence(LonePool(model)).step(token_ids, num_logits=1)])

    return _row("prefill", 1, tokens, work.prefill(tokens), limits, _median_seconds(step), report)


def _decode_row(
    model: LoadedModel, work: ModelWork, limits: MachineLimits, batch: int, context: int, report: Report
) -> StepRow:
    """The KV of the context is whatever the pool holds: zeros or old numbers take as long as any others."""
    pool = LonePool(model)
    sequences = [LoneSequence(pool, begin=context) for _ in range(batch)]
    token_ids = different_tokens(batch, vocab_size=_vocab_size(model))

    def step(number: int) -> object:
        for each in sequences:
            each.go_back(context + number)
        steps = [each.step((token,), num_logits=1) for each, token in zip(sequences, token_ids, strict=True)]
        return model.runner.run_step(steps)

    return _row("decode", batch, context, work.decode_step(batch, context), limits, _median_seconds(step), report)


def _row(
    what: str, batch: int, tokens: int, work: Work, limits: MachineLimits, measured_s: float, report: Report
) -> StepRow:
    row = StepRow(
        what=what,
        batch=batch,
        tokens=tokens,
        work=work,
        least_ms=work.least_seconds(limits) * 1e3,
        measured_ms=measured_s * 1e3,
        limit="bandwidth" if work.is_bandwidth_bound(limits) else "compute",
    )
    where = f"{tokens} tokens" if what == "prefill" else f"batch {batch}, context {tokens:,}"
    report(f"{what}, {where}: {row.measured_ms:.1f} ms, at least {row.least_ms:.1f} ms ({row.limit})")
    return row


def _median_seconds(step: Callable[[int], object]) -> float:
    """Of STEPS_MEASURED steps, numbered, after those in which the worker finds out how many threads are faster."""
    for _ in range(SETTLING_STEPS):
        step(0)
    times = []
    for number in range(STEPS_MEASURED):
        started_s = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - started_s)
    return median(times)


def _vocab_size(model: LoadedModel) -> int:
    return int(model.runner.model.config.get_text_config().vocab_size)


def _num_experts(config: PretrainedConfig) -> int:
    text = config.get_text_config()
    return int(getattr(text, "num_local_experts", 0) or getattr(text, "num_experts", 0) or 1)


def _int8_token_bytes(layout: KvLayout) -> int | None:
    if layout.codec != KvCodec.RAW:
        return None
    return replace(layout, codec=KvCodec.INT8_TOKEN.value).block_bytes // layout.block_tokens


def _free_bytes(device: torch.device) -> int:
    """What could be had now: of a CPU the host's memory that is free or can be freed, within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    left_bytes = left_in_cgroup(CGROUP)
    return free_bytes if left_bytes is None else min(free_bytes, left_bytes)
