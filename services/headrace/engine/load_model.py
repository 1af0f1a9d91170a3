"""Load a model into an engine: weights, pool, runner, and the namespace that names its KV.

This file owns the order of loading and what each refusal says. It knows nothing of requests or stores.
"""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from headrace.blocks import kv_codecs
from headrace.blocks.kv_codecs import TORCH_DTYPES
from headrace.config import DEFAULT_MODEL, POOL_CODECS, EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm, KvLayout, Namespace
from headrace.core.errors import ConfigInvalid, ModelRefused
from headrace.core.key_window import EVERYTHING, KeyWindow, model_window, near_parts
from headrace.core.layer_windows import LayerWindows
from headrace.engine.attention import ATTENTION_NAME, ShapeProbe, register_attention
from headrace.engine.check_model import hub_directory, local_directory
from headrace.engine.choose_attention import choose_attention, plain_logits
from headrace.engine.codec_bound import codec_line, lossy_codec
from headrace.engine.collapse_pages import collapse_pages
from headrace.engine.compare_forward import compare_forward
from headrace.engine.convert_gguf import model_cache_dir, prepare_default_model
from headrace.engine.fused_layer import fuse_layers
from headrace.engine.layered_kv import LayeredKV, PoolKV, make_kv
from headrace.engine.load_weights import load_weights
from headrace.engine.model_digests import (
    position_digest,
    read_check,
    tokenizer_digest,
    weights_digest,
    write_check,
)
from headrace.engine.model_families import MIXTURE_OF_EXPERTS, check_family
from headrace.engine.model_runner import ModelRunner
from headrace.engine.numerics_probe import ROW_MULTIPLES, find_exact_rows, probe_numerics, probe_runner
from headrace.engine.packed_linear import pack_linears
from headrace.engine.probe_shapes import probe_shapes, windows_line

TORCH_THREADS_MAX = 4  # what `torch_threads: 0` means at most; more workers on a host serve it better than more threads
HUGE_WEIGHT_BYTES = 64 << 20  # weights that a cache holds from step to step gain nothing by huge pages
CODE_FILES = (
    "attention",
    "compare_forward",
    "fused_layer",
    "lay_out_step",
    "layered_kv",
    "model_runner",
    "numerics_probe",
    "packed_linear",
    "pad_rows",
    "paged_kv",
    "send_numbers",
)

Report = Callable[[str], None]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to serve, and everything that others need to know of it."""

    name: str
    path: Path  # directory with tokenizer.json and config.json
    runner: ModelRunner
    kv: PoolKV
    namespace: Namespace
    context_tokens_max: int
    eos_token_ids: frozenset[int]
    window: KeyWindow  # what is read of a sequence's earlier KV
    windows: LayerWindows  # of each layer
    exact: bool  # whether reuse changes no bit

    @property
    def layer_token_bytes(self) -> int:
        """What one token takes of the pool in one layer."""
        part = self.kv.layout.wide
        return part.block_bytes // (part.num_layers * part.block_tokens)

    @property
    def near_window(self) -> KeyWindow:
        """What the layers read whose KV is in near parts, if blocks have some."""
        return self.kv.near_window if isinstance(self.kv, LayeredKV) else EVERYTHING


def _in_a_thread_that_ends(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Has the function run in a thread of its own, and with it end the threads that torch starts for it.

    Where more of those are left than there are cores, idle or not, OpenMP lets none spin while it waits: the step
    thread's would then sleep between any two operators, and steps on two threads took 37 ms instead of 22.
    """

    @wraps(function)
    def run(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        with ThreadPoolExecutor(1, thread_name_prefix="headrace-load") as thread:
            return thread.submit(function, *args, **named).result()

    return run


@_in_a_thread_that_ends
def load_model(
    settings: ModelSettings,
    engine: EngineSettings,
    *,
    trust_group: str,
    hash_algorithm: HashAlgorithm,
    report: Report,
) -> LoadedModel:
    """Load the model that the settings name. Where some of its layers have a window and others none, their KV is in
    blocks of two parts (`layered_kv.py`). Blocks until it is loaded.

    `report` gets lines for people: what takes long, and whether exactness holds. Raises ModelRefused (what is wrong
    with the model, and the remedy) or ConfigInvalid.
    """
    name, path = find_model(settings, report=report)
    config = _read_config(name, path)
    check_family(name, config)
    context_tokens_max = _context_tokens_max(config, engine)
    threads = settings.torch_threads or min(TORCH_THREADS_MAX, len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    cache_dir = model_cache_dir(settings)
    weights = weights_digest(path, cache_dir)
    register_attention()
    model = _read_weights(name, path, settings)
    shapes = probe_shapes(model)
    one_part = _kv_layout(name, model, shapes, engine)
    windows = LayerWindows(tuple(shapes.windows[layer] for layer in sorted(shapes.windows)))
    layout = replace(one_part, near_layers=windows.near_layers)
    window = model_window(shapes.windows.values(), block_tokens=engine.block_tokens)
    near_window = windows.near_window(engine.block_tokens)
    if (windowed := windows_line(windows.tokens, window, context_tokens_max, near_window)) is not None:
        report(f"{name}: {windowed}")
    plain = None if model.device.type == "cpu" else plain_logits(model)
    _rearrange_weights(model, exact=_wants_bits(settings, config, model), threads=threads)
    numerics = _check_numerics(
        settings,
        name=name,
        path=path,
        config=config,
        model=model,
        layout=one_part,
        threads=threads,
        weights=weights,
        report=report,
    )
    exact = numerics.exact and engine.store_codec == "raw"
    if lossy_codec(engine) is not None:
        report(f"{name}: {codec_line(settings, engine, path)}")
    kv = _make_pool(layout, engine, windows=windows, device=model.device)
    runner = ModelRunner(
        model, kv, row_multiple=numerics.row_multiple, threads=threads, small_threads_max=numerics.small_threads_max
    )
    not_exact = "flex" if choose_attention(runner, settings, engine, name=name, report=report, plain=plain) else ""
    return LoadedModel(
        name=name,
        path=path,
        runner=runner,
        kv=kv,
        namespace=Namespace(
            model_id=name,
            weights_digest=weights,
            tokenizer_digest=tokenizer_digest(path),
            adapter_digest="",
            layout=layout if engine.store_codec == "raw" else replace(layout, codec=engine.store_codec),
            position_digest=position_digest(config, shapes.windows),
            numerics_probe=numerics.digest if exact else not_exact,
            hash_algorithm=hash_algorithm,
            trust_group=trust_group,
        ),
        context_tokens_max=context_tokens_max,
        eos_token_ids=_eos_token_ids(name, path, config),
        window=window,
        windows=windows,
        exact=exact,
    )


def _wants_bits(settings: ModelSettings, config: PretrainedConfig, model: PreTrainedModel) -> bool:
    """Whether bits are promised where the self-test finds that they hold."""
    return settings.exact and config.model_type not in MIXTURE_OF_EXPERTS and model.device.type == "cpu"


def _rearrange_weights(model: PreTrainedModel, *, exact: bool, threads: int) -> None:
    """In place: few operators, and the order and the pages in which a CPU reads weights fastest."""
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    fuse_layers(model)
    if model.device.type != "cpu":
        return
    pack_linears(model, exact=exact, threads=threads)
    if weight_bytes >= HUGE_WEIGHT_BYTES:
        collapse_pages()


def _make_pool(layout: KvLayout, engine: EngineSettings, *, windows: LayerWindows, device: torch.device) -> PoolKV:
    """The pool's tensors. Raises ConfigInvalid where there is no memory for them."""
    num_blocks, by_layer = engine.pool_tokens // engine.block_tokens, dict(enumerate(windows.tokens))
    num_near = near_parts(num_blocks, engine.batch_sequences_max, windows.near_window(engine.block_tokens))
    try:
        return make_kv(layout, num_blocks, windows=by_layer, num_near=num_near, device=device)
    except (RuntimeError, MemoryError) as error:
        wanted_mb = engine.pool_tokens * layout.token_bytes >> 20
        raise ConfigInvalid("pool_tokens", f"a pool of {wanted_mb} MiB cannot be had ({error}); choose less") from error


def find_model(settings: ModelSettings, *, report: Report) -> tuple[str, Path]:
    """The model's name and directory: the built-in one (made on first use), a local directory, or a hub download."""
    if settings.model == DEFAULT_MODEL:
        return DEFAULT_MODEL, prepare_default_model(model_cache_dir(settings), report=report)
    if (local := local_directory(settings.model)) is not None:
        return local.resolve().name, local
    report(f"fetching {settings.model} from the hub (or its local cache)")
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    return settings.model, hub_directory(settings.model, wanted)


def describe_codec(settings: ModelSettings, engine: EngineSettings, *, report: Report) -> str:
    """As `codec_line`, for the model that the settings name. Raises ModelRefused."""
    return codec_line(settings, engine, find_model(settings, report=report)[1]) if lossy_codec(engine) else ""


def _read_config(name: str, path: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelRefused(name, f"its config.json cannot be used: {error}") from error


def _context_tokens_max(config: PretrainedConfig, engine: EngineSettings) -> int:
    model_limit = int(config.max_position_embeddings)
    limit = min(model_limit, engine.context_tokens_max or model_limit)
    if engine.block_tokens > limit:
        raise ConfigInvalid("block_tokens", f"{engine.block_tokens} exceeds the model's context of {limit} tokens")
    return limit


def _read_weights(name: str, path: Path, settings: ModelSettings) -> PreTrainedModel:
    """The model in evaluation mode on its device, with paged attention."""
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigInvalid("device", "no CUDA device is present; use auto or cpu")
    dtype: Any = "auto" if settings.dtype == "auto" else TORCH_DTYPES[settings.dtype]
    try:
        model: Any = load_weights(path, dtype=dtype, attn_implementation=ATTENTION_NAME)
        return model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelRefused(name, f"its weights cannot be loaded: {error}") from error


def _kv_layout(name: str, model: PreTrainedModel, shapes: ShapeProbe, engine: EngineSettings) -> KvLayout:
    """The pool's block layout from what the layers made; every layer must make the same."""
    if sorted(shapes.shapes) != list(range(model.config.num_hidden_layers)) or not shapes.causal:
        raise ModelRefused(name, "not every layer is causal attention through transformers' attention interface")
    if len(set(shapes.shapes.values())) != 1:
        raise ModelRefused(name, f"its layers differ in KV heads or head size: {sorted(set(shapes.shapes.values()))}")
    kv_heads, key_dim, value_dim = shapes.shapes[0]
    if key_dim != value_dim:
        raise ModelRefused(name, f"its keys have {key_dim} elements and its values {value_dim}; a block holds one size")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in TORCH_DTYPES:
        raise ModelRefused(name, f"number format {dtype} is not served; set dtype to {', '.join(TORCH_DTYPES)}")
    return KvLayout(
        dtype, len(shapes.shapes), kv_heads, key_dim, engine.block_tokens, codec=POOL_CODECS[engine.pool_codec]
    )


@dataclass(frozen=True, slots=True)
class _Numerics:
    """What the self-tests found: how rows are padded, on how many threads few of them are computed, whether bits are
    then fixed, and the probe prompt's digest."""

    row_multiple: int
    small_threads_max: int
    exact: bool
    digest: str


def _check_numerics(
    settings: ModelSettings,
    *,
    name: str,
    path: Path,
    config: PretrainedConfig,
    model: PreTrainedModel,
    layout: KvLayout,
    threads: int,
    weights: str,
    report: Report,
) -> _Numerics:
    """Run the self-tests, or take over what they found before for the same weights, code, libraries and processor.

    A remembered outcome counts only while the probe prompt still gives the remembered bytes.
    """
    cache_dir = model_cache_dir(settings)
    key = {
        "what": "numerics",
        "weights": weights,
        "config": config.to_dict(),
        "layout": layout.shape,
        "dtype": layout.dtype,
        "codec": layout.codec,
        "device": model.device.type,
        "threads": threads,
        "exact": settings.exact,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": _processor(),
        "code": _code_digest(),
    }

    def probe(row_multiple: int) -> str:
        return probe_numerics(probe_runner(model, layout, row_multiple=row_multiple, threads=threads))

    known = read_check(cache_dir, key)
    if known is not None and probe(known["row_multiple"]) == known["digest"]:
        found = _Numerics(**known)
        _report_numerics(found, settings, name=name, config=config, model=model, threads=threads, report=report)
        return found
    report(f"{name}: checking paged attention against the model's own, and that bits do not depend on the batch")
    compare_forward(name, path, config)
    rows = None
    if _wants_bits(settings, config, model):
        rows = find_exact_rows(model, layout, threads=threads)
    # Few rows cost no more than a padded four, on CPU; see packed_linear.py.
    row_multiple = rows.row_multiple if rows else ROW_MULTIPLES[0] if model.device.type == "cpu" else 1
    found = _Numerics(
        row_multiple=row_multiple,
        small_threads_max=rows.small_threads_max if rows else threads,
        exact=rows is not None,
        digest=probe(row_multiple),
    )
    _report_numerics(found, settings, name=name, config=config, model=model, threads=threads, report=report)
    write_check(cache_dir, key, asdict(found))
    return found


def _report_numerics(
    found: _Numerics,
    settings: ModelSettings,
    *,
    name: str,
    config: PretrainedConfig,
    model: PreTrainedModel,
    threads: int,
    report: Report,
) -> None:
    if settings.exact and not found.exact:
        report(f"{name}: {_why_not_exact(config, model)}; exact mode is off (docs/exactness.md)")
    if found.small_threads_max < threads:
        report(f"{name}: on {threads} threads few rows get other bits than many; steps of few rows stay on one")


def _why_not_exact(config: PretrainedConfig, model: PreTrainedModel) -> str:
    if config.model_type in MIXTURE_OF_EXPERTS:
        return "which rows an expert sees depends on the batch (mixture of experts)"
    if model.device.type != "cpu":
        return "exactness is claimed on CPU only"
    return "the bitwise self-test failed on this processor with this build of torch"


def _eos_token_ids(name: str, path: Path, config: PretrainedConfig) -> frozenset[int]:
    """generation_config.json's end tokens, else config.json's."""
    file = path / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    except (OSError, ValueError, AttributeError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ModelRefused(name, f"its generation_config.json cannot be used: {error}") from error
    if found is None:
        found = config.eos_token_id
    return frozenset(found if isinstance(found, list) else () if found is None else (found,))


def _processor() -> str:
    """What decides which kernels run: the processor's name and instruction sets."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    named = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join([torch.backends.cpu.get_cpu_capability(), *named]).encode()).hexdigest()[:32]


def _code_digest() -> str:
    """Digest of the files whose change may change bits or their check."""
    files = [*(Path(__file__).with_name(f"{name}.py") for name in CODE_FILES), Path(kv_codecs.__file__)]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:32]
