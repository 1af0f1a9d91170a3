"""Digests that say which model this is: weights, tokenizer, positions; and the small cache that spares re-reading them.

This file owns what goes into each digest and the files `<model cache>/checks/*.json`. A check file is a memo: damaged
or missing, it is made again. It knows nothing of engines.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from transformers import PretrainedConfig

from headrace.core.errors import ModelRefused

READ_BYTES = 8 * 1024 * 1024

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")

# Configuration entries that say how a position or a window enters attention, by part of their name.
POSITION_WORDS = ("rope", "rotary", "window", "layer_types", "position", "softcap", "attention_multiplier")


def weights_digest(path: Path, cache_dir: Path) -> str:
    """xxh3-128 over the names and bytes of a model directory's weight files, in name order.

    Remembered under `cache_dir` for as long as no file's size or modification time changes. Raises ModelRefused when
    the directory holds no weights.
    """
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    if not files:
        raise ModelRefused(str(path), "the directory holds no *.safetensors or *.bin file; give a complete checkpoint")
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key = {"what": "weights digest", "path": str(path.resolve()), "files": stamps}
    known = read_check(cache_dir, key)
    if known is not None:
        return str(known["digest"])
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(READ_BYTES):
                digest.update(chunk)
    write_check(cache_dir, key, {"digest": digest.hexdigest()})
    return digest.hexdigest()


def tokenizer_digest(path: Path) -> str:
    """SHA-256, cut to 128 bits, over the files that turn text into token ids."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        file = path / name
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def position_digest(config: PretrainedConfig, windows: Mapping[int, int | None]) -> str:
    """SHA-256, cut to 128 bits, over the rotary, window and softcap parameters.

    windows: each layer's sliding window as its attention really asked for it.
    """
    named = {
        name: value for name, value in config.to_dict().items() if any(word in name.lower() for word in POSITION_WORDS)
    }
    named["windows"] = sorted(windows.items())
    return hashlib.sha256(_canonical(named)).hexdigest()[:32]


def read_check(cache_dir: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `write_check` stored under this key; None when there is nothing readable."""
    try:
        stored = json.loads(_check_file(cache_dir, key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(stored, dict) or stored.get("key") != json.loads(_canonical(key)):
        return None
    value = stored.get("value")
    return value if isinstance(value, dict) else None


def write_check(cache_dir: Path, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    """Remember `value` under `key`, atomically. A directory that cannot be written to only costs time later."""
    file = _check_file(cache_dir, key)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(_canonical({"key": key, "value": value}))
        partial.replace(file)
    except OSError:
        return


def _check_file(cache_dir: Path, key: Mapping[str, Any]) -> Path:
    return cache_dir / "checks" / f"{hashlib.sha256(_canonical(key)).hexdigest()[:32]}.json"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
