"""What a load came to: counts and distributions that grow with nothing, whatever is sent.

Owns the formulas. Times of a request run from its planned arrival: a generator that is late makes its own figures worse
and never better, and how late it was is measured apart (`lag`).

    ttft   first token - planned arrival
    itl    one token - the token before it
    tpot   (last token - first token) / (tokens - 1), one value a request
    e2e    end of the answer - planned arrival
    good   a finished request with ttft <= slo.ttft_ms and tpot <= slo.itl_ms
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headrace.bench.latency_histogram import LatencyHistogram
from headrace.bench.serving_targets import AnswerUsage

# A generator that is later than this with one request in a hundred did not keep the arrival times.
LAG_MS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one request, in milliseconds."""

    ttft_ms: float
    itl_ms: float


class LoadTally:
    """Everything that is counted. Times come from the caller, in seconds of one clock."""

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.sent = self.finished = self.failed = self.interrupted = self.good = 0
        self.not_sent = 0  # planned, and never sent: too many were under way
        self.errors: Counter[str] = Counter()
        self.error_examples: dict[str, str] = {}
        self.ttft, self.itl, self.tpot, self.e2e, self.lag = (LatencyHistogram() for _ in range(5))
        self.prompt_tokens = self.completion_tokens = 0
        self.cached_tokens: Counter[str] = Counter()  # by source
        # Whether any answer said what was cached. Some servers leave it out of answers that found nothing (vLLM), so
        # one answer without it says nothing; if all are, nobody knows.
        self.tells_cached = False
        self.start_s = self.end_s = 0.0

    @property
    def under_way(self) -> int:
        """Requests that were sent and have not ended."""
        return self.sent - self.finished - self.failed - self.interrupted

    @property
    def kept_arrivals(self) -> bool:
        """Whether the generator kept the arrival times: if not, the load was not the one that was asked for."""
        late_ms = self.lag.percentile(99)
        return self.not_sent == 0 and (late_ms is None or late_ms <= LAG_MS_MAX)

    @property
    def cached_share(self) -> float | None:
        """Cached prompt tokens / prompt tokens (the token hit rate); None where the server does not say."""
        return self.cached_tokens.total() / self.prompt_tokens if self.tells_cached and self.prompt_tokens else None

    def begin(self, now_s: float) -> None:
        """Arrivals are planned from now on."""
        self.start_s = self.end_s = now_s

    def send(self, *, planned_s: float, now_s: float) -> "RequestTally":
        """A request goes out."""
        self.sent += 1
        self.lag.add((now_s - planned_s) * 1e3)
        return RequestTally(self, planned_s)

    def as_json(self) -> dict[str, Any]:
        """The counts for scripts; None where nothing was measured."""
        seconds = max(1e-9, self.end_s - self.start_s)
        return {
            "requests": {
                "sent": self.sent,
                "finished": self.finished,
                "failed": self.failed,
                "interrupted": self.interrupted,
                "not_sent": self.not_sent,
            },
            "errors": dict(self.errors),
            "error_examples": self.error_examples,
            "seconds": seconds,
            "ttft_ms": self.ttft.summary(),
            "itl_ms": self.itl.summary(),
            "tpot_ms": self.tpot.summary(),
            "e2e_ms": self.e2e.summary(),
            "throughput": {
                "requests_per_s": self.finished / seconds,
                "prompt_tokens_per_s": self.prompt_tokens / seconds,
                "output_tokens_per_s": self.completion_tokens / seconds,
            },
            "goodput": {
                "ttft_ms_max": self.slo.ttft_ms,
                "itl_ms_max": self.slo.itl_ms,
                "requests": self.good,
                "share_of_sent": self.good / self.sent if self.sent else None,
                "requests_per_s": self.good / seconds,
            },
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": dict(self.cached_tokens) if self.tells_cached else None,
            "cached_share": {
                source: count / self.prompt_tokens for source, count in self.cached_tokens.items() if self.prompt_tokens
            }
            | {"total": self.cached_share},
            "generator": {"lag_ms": self.lag.summary(), "kept_arrivals": self.kept_arrivals},
        }

    def check_integrity(self) -> None:
        """Each request that was sent has one end or is under way."""
        assert self.under_way >= 0
        assert self.failed == self.errors.total()
        assert self.good <= self.finished
        assert self.ttft.count >= self.tpot.count


class RequestTally:
    """One request under way: of it, three moments and a count are kept. Exactly one of its ends is called."""

    def __init__(self, tally: LoadTally, planned_s: float) -> None:
        self._tally = tally
        self._planned_s = planned_s
        self._first_s = self._last_s = 0.0
        self._tokens = 0

    def token(self, now_s: float) -> None:
        """One more token is there."""
        if self._tokens == 0:
            self._first_s = now_s
            self._tally.ttft.add((now_s - self._planned_s) * 1e3)
        else:
            self._tally.itl.add((now_s - self._last_s) * 1e3)
        self._last_s = now_s
        self._tokens += 1

    def finish(self, usage: AnswerUsage, now_s: float) -> None:
        """The answer is whole. An answer without text counts as there when it ended."""
        if self._tokens == 0:
            self.token(now_s)
        tally = self._tally
        tpot_ms = 0.0
        if usage.completion_tokens > 1 and self._tokens > 1:
            tpot_ms = (self._last_s - self._first_s) * 1e3 / (usage.completion_tokens - 1)
            tally.tpot.add(tpot_ms)
        tally.e2e.add((now_s - self._planned_s) * 1e3)
        tally.finished += 1
        tally.prompt_tokens += usage.prompt_tokens
        tally.completion_tokens += usage.completion_tokens
        if usage.cached_tokens is not None:
            tally.tells_cached = True
            tally.cached_tokens.update(usage.cached_tokens)
        in_time = (self._first_s - self._planned_s) * 1e3 <= tally.slo.ttft_ms and tpot_ms <= tally.slo.itl_ms
        tally.good += in_time
        tally.end_s = max(tally.end_s, now_s)

    def fail(self, kind: str, message: str, now_s: float) -> None:
        """It ended with an error; what came before counts in the distributions only."""
        self._tally.failed += 1
        self._tally.errors[kind] += 1
        self._tally.error_examples.setdefault(kind, message)
        self._tally.end_s = max(self._tally.end_s, now_s)

    def interrupt(self, now_s: float) -> None:
        """The generator was told to stop before it ended."""
        self._tally.interrupted += 1
        self._tally.end_s = max(self._tally.end_s, now_s)
