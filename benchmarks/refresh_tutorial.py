"""Run every command of docs/learn and put what it prints below it; pictures go to docs/images.

For a quiet machine, since the tables hold times; takes some minutes. Another page whose commands stand in blocks of the
same kind (docs/verify.md) may be named too. A command of the tutorial that takes more than its two minutes is reported,
and the script then fails.

Usage: python benchmarks/refresh_tutorial.py [PAGE.md ...]
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
TIMEOUT_S = 900
PROMISED_S = 120
# What leaves something running ends with this.
ENDS_WITH = {"headrace demo": "headrace down"}


def refresh_tutorial(page: Path) -> list[str]:
    """Replace the output of each command on one page; the commands that took longer than promised.

    Raises CalledProcessError where a command fails."""
    slow: list[str] = []

    def rerun(block: re.Match[str]) -> str:
        command = block[1]
        with tempfile.TemporaryDirectory() as folder:
            started_s = time.monotonic()
            printed, took_s = _run(command, folder), time.monotonic() - started_s
            if command in ENDS_WITH:
                _run(ENDS_WITH[command], folder)
            for picture in Path(folder).glob("*.png"):
                shutil.copy(picture, PICTURES)
        print(f"{page.name}: {command}: {took_s:.0f} s", flush=True)
        if took_s > PROMISED_S and page.parent == CHAPTERS:
            slow.append(command)
        lines = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
        return f"```console\n$ {command}\n{lines}\n```"

    text = page.read_text(encoding="utf-8")
    page.write_text(BLOCK.sub(rerun, text), encoding="utf-8")
    return slow


def _run(command: str, folder: str) -> str:
    """What it prints, as if it had been called by the name that the tutorial uses."""
    binaries = Path(sys.executable).parent
    program = [str(binaries / "headrace"), *shlex.split(command)[1:]]
    done = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, cwd=folder)
    return done.stdout.replace(f"{binaries}/", ".venv/bin/")


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]] or sorted(CHAPTERS.glob("[0-9]*.md"))
    too_slow = [command for each in pages for command in refresh_tutorial(each)]
    sys.exit(f"took more than {PROMISED_S} s: {', '.join(too_slow)}" if too_slow else 0)
