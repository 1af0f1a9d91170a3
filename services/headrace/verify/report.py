"""What a verification found, for scripts and for people."""

from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.generation import CachedTokens
from headrace.verify.measure_kv_cache import COMPARED_TOKENS, KvCacheComparison
from headrace.verify.verify_together import Together

PATHS = ("cold", "in_process", "shared_memory", "grpc", "after_store_restart")
Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


@dataclass(frozen=True, slots=True)
class PathRun:
    """One prompt by one path. `reused` says that the cached tokens were those that the path promises: a path that did
    not reuse anything shows nothing about reuse."""

    prompt_tokens: int
    generated_tokens: int
    cached: CachedTokens
    ttft_ms: float
    token_equal: bool
    bit_equal: bool
    reused: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Everything. `equal` is the verdict."""

    model: str
    exact_claimed: bool
    generated_tokens: int
    runs: dict[str, list[PathRun]]  # path -> one run per prompt, the longest prompt first
    kv_cache: KvCacheComparison
    together: Together
    plot: str

    @property
    def token_equal(self) -> bool:
        """Whether every run gave the token ids of the cold one."""
        parts = (self.kv_cache.token_equal, self.together.token_equal)
        return all(run.token_equal for runs in self.runs.values() for run in runs) and all(parts)

    @property
    def bit_equal(self) -> bool:
        """Whether every run gave the bits of the cold one's logits."""
        parts = (self.kv_cache.bit_equal, self.together.bit_equal)
        return all(run.bit_equal for runs in self.runs.values() for run in runs) and all(parts)

    @property
    def reused(self) -> bool:
        """Whether every path reused what it was meant to reuse, and company did what it was meant to do."""
        return all(run.reused for runs in self.runs.values() for run in runs) and self.together.as_meant

    @property
    def equal(self) -> bool:
        """The verdict: nothing differs, and reuse did take place."""
        return self.token_equal and self.bit_equal and self.reused

    def as_json(self) -> dict[str, Any]:
        """The report for scripts; `paths` has the times of the longest prompt, `prompts` all of them."""
        return {
            "model": self.model,
            "exact_claimed": self.exact_claimed,
            "bit_equal": self.bit_equal,
            "token_equal": self.token_equal,
            "reused": self.reused,
            "generated_tokens": self.generated_tokens,
            "paths": {path: self._path_json(runs) for path, runs in self.runs.items()},
            f"kv_cache_speedup_at_{COMPARED_TOKENS}": round(self.kv_cache.speedup, 2),
            "kv_cache": asdict(self.kv_cache),
            "together": asdict(self.together) | {"as_meant": self.together.as_meant},
            "prompts": {path: [asdict(run) for run in runs] for path, runs in self.runs.items()},
            "plot": self.plot,
        }

    @staticmethod
    def _path_json(runs: list[PathRun]) -> dict[str, Any]:
        return {
            "ttft_ms": round(runs[0].ttft_ms, 2),
            "bit_equal": all(run.bit_equal for run in runs),
            "token_equal": all(run.token_equal for run in runs),
            "reused": all(run.reused for run in runs),
            "prompt_tokens": runs[0].prompt_tokens,
            "cached_tokens": runs[0].cached.total,
        }

    def tables(self) -> list[Table]:
        """Paths, company, decoding speed and memory, as tables for people."""
        return [self._paths_table(), self._together_table(), self._growth_table()]

    def _paths_table(self) -> Table:
        cold_ms = [run.ttft_ms for run in self.runs["cold"]]
        rows = [
            [
                path,
                f"{run.prompt_tokens:,}",
                f"{run.cached.total:,}",
                f"{run.ttft_ms:,.1f} ms",
                f"{cold / run.ttft_ms:.1f}x",
                f"{run.generated_tokens:,}",
                _yes(run.token_equal),
                _yes(run.bit_equal),
                _yes(run.reused),
            ]
            for path, runs in self.runs.items()
            for cold, run in zip(cold_ms, runs, strict=True)
        ]
        columns = ["path ", "prompt", "cached", "first token", "against cold", "generated"]
        return (f"{self.model}: reuse against cold", [*columns, "tokens equal", "bits equal", "as meant"], rows)

    def _together_table(self) -> Table:
        found = self.together
        columns = [
            "requests",
            "steps of several",
            "cut prompts",
            "preempted",
            "blocks shared",
            "drafts accepted",
            "tokens equal",
            "bits equal",
            "as meant",
        ]
        row = [
            str(found.requests),
            str(found.num_batched_steps),
            f"{found.num_cut_pieces} pieces",
            f"{found.num_preemptions} times",
            str(found.num_shared_blocks),
            f"{found.num_accepted_tokens} of {found.num_drafted_tokens} tokens",
            _yes(found.token_equal),
            _yes(found.bit_equal),
            _yes(found.as_meant),
        ]
        return ("All at once in a small pool, against each alone", columns, [row])

    def _growth_table(self) -> Table:
        rows = [
            [
                f"{row.text_tokens:,}",
                f"{row.with_cache_tokens_per_s:.1f}",
                f"{row.without_cache_tokens_per_s:.1f}",
                f"{row.kv_bytes / 2**20:.1f} MiB",
            ]
            for row in self.kv_cache.growth
        ]
        found = self.kv_cache
        title = (
            f"{COMPARED_TOKENS} new tokens after {found.prompt_tokens}: {found.with_cache_s:.1f} s with KV cache, "
            f"{found.without_cache_s:.1f} s without, {found.speedup:.1f} times faster"
        )
        return (title, ["text, tokens", "tokens/s with cache", "tokens/s without", "KV memory"], rows)

    def verdict(self) -> str:
        """One line."""
        if self.equal:
            return f"equal: {len(self.runs)} paths, alone and together, tokens and bits; plot in {self.plot}"
        if self.token_equal and self.bit_equal:
            return (
                "NOT SHOWN: a path did not reuse, or company not do, what it was meant to, so its equality says nothing"
            )
        what = "token ids" if not self.token_equal else "the bits of logits (token ids are equal)"
        claim = "" if self.exact_claimed else "; exactness is not claimed for this model on this device"
        return f"NOT EQUAL: {what} differ{claim}"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
