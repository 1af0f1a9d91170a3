"""Run every command of docs/learn and put what it prints below it; pictures go to docs/images.

For a quiet machine, since the tables hold times; takes some minutes.

Usage: python benchmarks/refresh_tutorial.py [CHAPTER.md ...]
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
CHAPTERS, PICTURES = DOCS / "learn", DOCS / "images"
BLOCK = re.compile(r"```console\n\$ (headrace [^\n]*)\n.*?```", re.DOTALL)
TIMEOUT_S = 600


def refresh_tutorial(chapter: Path) -> None:
    """Replace the output of each command in one chapter. Raises CalledProcessError where a command fails."""

    def rerun(block: re.Match[str]) -> str:
        command = block[1]
        started_s = time.monotonic()
        binaries = Path(sys.executable).parent
        program = [str(binaries / "headrace"), *shlex.split(command)[1:]]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, cwd=folder)
            for picture in Path(folder).glob("*.png"):
                shutil.copy(picture, PICTURES)
        print(f"{chapter.name}: {command}: {time.monotonic() - started_s:.0f} s", flush=True)
        printed = done.stdout.rstrip().replace(f"{binaries}/", ".venv/bin/")
        lines = "\n".join(line.rstrip() for line in printed.splitlines())
        return f"```console\n$ {command}\n{lines}\n```"

    text = chapter.read_text(encoding="utf-8")
    chapter.write_text(BLOCK.sub(rerun, text), encoding="utf-8")


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(CHAPTERS.glob("[0-9]*.md")):
        refresh_tutorial(path)
