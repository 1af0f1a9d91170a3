"""What `headrace demo` shows: a row for each path by which a prompt's beginning was had, as a table and as demo.json.

Owns how rows are judged as a whole and how they look; which requests gave them is `ask_every_path.py`'s.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.client import GenerateResult
from headrace.core.generation import CachedTokens

TEXT_FILE = Path(__file__).with_name("demo_text.md")
TEXT_LICENCE = "written for this project, Apache-2.0"


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One path. `as_meant`: the cached tokens came from where the path says, and were as many as can be."""

    path: str
    title: str  # the path in words
    result: GenerateResult
    equal_to_cold: bool
    as_meant: bool
    attempts: int  # how often it was asked until it was as meant: all are compared with cold, the last is shown

    def as_json(self) -> dict[str, Any]:
        """The row for scripts."""
        cached = self.result.usage.cached
        return {
            "path": self.path,
            "prompt_tokens": self.result.usage.prompt_tokens,
            "cached_tokens": {str(source): count for source, count in cached.by_source().items()},
            "ttft_ms": round(self.result.ttft_ms, 2),
            "equal_to_cold": self.equal_to_cold,
            "as_meant": self.as_meant,
            "attempts": self.attempts,
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All rows, the cold one first."""

    model: str
    rows: tuple[DemoRow, ...]

    @property
    def equal(self) -> bool:
        """Whether every row is equal to cold and shows what it is meant to show."""
        return all(row.equal_to_cold and row.as_meant for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """What demo.json holds."""
        return {"rows": [row.as_json() for row in self.rows]}

    def write(self, directory: Path) -> Path:
        """Leave demo.json there, and return where it is."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "demo.json"
        file.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        return file

    def preface(self) -> list[str]:
        """What was sent."""
        return [
            f"Model {self.model}. The prompts share {TEXT_FILE.name} ({TEXT_LICENCE}) and end in different questions.",
            "Equal to cold: the same question with the cache bypassed gave the same token ids and the same text.",
        ]

    def table(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, columns and rows."""
        cold_ms = self.rows[0].result.ttft_ms
        rows = [
            [
                row.title,
                f"{row.result.usage.prompt_tokens:,}",
                cached_by_source(row.result.usage.cached),
                f"{row.result.ttft_ms:,.0f} ms",
                f"{cold_ms / row.result.ttft_ms:.1f}x",
                ("yes" if row.equal_to_cold else "NO") + ("" if row.as_meant else " (reuse NOT as meant)"),
            ]
            for row in self.rows
        ]
        return "", ["path ", "prompt tokens", "cached tokens ", "first token", "against cold", "equal to cold "], rows

    def verdict(self) -> str:
        """The outcome in a sentence."""
        return "Every answer is equal to the cold one." if self.equal else "NOT every row is as it must be; see above."


def cached_by_source(cached: CachedTokens) -> str:
    """`3,456 shared_memory`, or `0`."""
    return ", ".join(f"{count:,} {source}" for source, count in cached.by_source().items() if count) or "0"
