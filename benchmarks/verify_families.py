"""`headrace verify` on tiny random models of several kinds: no window, windows in all layers or in some, capped logits,
learned positions. Every path, and batches, chunks, preemption, sharing and drafts all at once; bits are compared.

Takes a minute or two on a quiet machine. Ends with 1 where anything differs or did not take place.

Usage: python benchmarks/verify_families.py [FAMILY ...]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.unit.engine_model.tiny_models import VOCAB_SIZE, make_model  # noqa: E402 - the tests' own models

CASES = ("llama", "qwen3", "mistral with a window", "gemma2", "gemma3_text", "gpt2")
FAMILIES = {case.split()[0]: case for case in CASES}
SETTINGS = ("--tokens=20", "--block-tokens=16", "--torch-threads=1")


def verify_families(families: list[str]) -> bool:
    """Print each verdict; whether all are equal."""
    codes = [_verify(family) for family in families]
    return not any(codes)


def _verify(family: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"tiny-{family}"
        make_model(FAMILIES[family]).save_pretrained(model)
        _make_tokenizer().save(str(model / "tokenizer.json"))
        where = (f"--model={model}", f"--model-cache-dir={folder}", f"--plot={folder}/verify.png")
        done = subprocess.run(
            [Path(sys.executable).parent / "headrace", "verify", *SETTINGS, *where],
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:]
    print(f"{family}: {lines[-1].partition(';')[0]}")
    if "All at once" in done.stdout:
        company = next(at for at, line in enumerate(lines) if line.startswith("All at once"))
        print(*lines[company + 1 : company + 3], sep="\n", flush=True)
    return done.returncode


def _make_tokenizer() -> Tokenizer:
    """A token for each of the first characters that bytes stand for; the others are left out of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


if __name__ == "__main__":
    sys.exit(not verify_families(sys.argv[1:] or list(FAMILIES)))
