"""Two OpenAI-compatible servers side by side: the same conversations at the same times, to A, B, A, B, in one run.

    headrace up --http-port 8000            # A
    vllm serve MODEL --port 8001            # B: the same model, dtype and context
    python benchmarks/compare_serving.py --a http://127.0.0.1:8000 --b http://127.0.0.1:8001 --rate 2 --requests 120

It sends what `headrace bench serve` sends: made-up conversations of several turns that share system prompts, in an open
loop. Each round has conversations of its own, so that nothing is found that an earlier round left; within a round both
servers get the same requests. Lengths fit the shorter of the two contexts. Rounds 1, 2, ... count; a round before them
warms up. A ratio is A's figure over B's of the same round, so that what the machine did then is in both; printed are
medians over the rounds, and the least and the largest ratio. Both servers must be idle but for this load, and neither
may take the other's processor while it is idle itself: give each cores or a GPU of its own.

Keys of the servers are read from API_KEY_A and API_KEY_B, or from --api-key-a and --api-key-b, which other users of the
machine see; each goes to its own server alone. A server that takes OpenAI's own fields alone needs --stop-at-eos: then
answers end where a model ends them, and may be of different lengths.

Remarks on standard error say what would make a comparison unfair: requests that failed, arrivals that were not kept,
answers of other lengths. Judges nothing. `--json` prints every round's full report. What the figures mean:
docs/benchmarks.md, serve.
"""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from headrace.bench.generate_load import LoadBounds
from headrace.bench.measure_serving import ServingEndpoint, Workload, measure_serving, opened
from headrace.bench.serving_report import LoadReport
from headrace.bench.serving_tally import LoadTally, Slo
from headrace.core.errors import HeadraceError

# A figure's name, and where it is in a tally; None where it was not measured.
FIGURES: dict[str, Callable[[LoadTally], float | None]] = {
    "TTFT p50, ms": lambda tally: tally.ttft.percentile(50),
    "TTFT p90, ms": lambda tally: tally.ttft.percentile(90),
    "ITL p50, ms": lambda tally: tally.itl.percentile(50),
    "ITL p90, ms": lambda tally: tally.itl.percentile(90),
    "TPOT p50, ms": lambda tally: tally.tpot.percentile(50),
    "E2E p50, ms": lambda tally: tally.e2e.percentile(50),
    "output tokens/s": lambda tally: tally.completion_tokens / (tally.end_s - tally.start_s),
    "goodput, requests/s": lambda tally: tally.good / (tally.end_s - tally.start_s),
    "cached share": lambda tally: tally.cached_share,
}


@dataclass(frozen=True, slots=True)
class Round:
    """The same requests, answered by both."""

    a: LoadReport
    b: LoadReport


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure over all rounds; None where a server does not tell it."""

    figure: str
    a: float | None  # median over the rounds
    b: float | None
    ratio: float | None  # of A to B in the same round: the median, ...
    ratio_min: float | None  # ... the least and the largest
    ratio_max: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, help="base URL")
    parser.add_argument("--b", required=True, help="base URL")
    parser.add_argument("--model-a", default="", help="needed only where several are served")
    parser.add_argument("--model-b", default="")
    for name in ("a", "b"):
        variable = f"API_KEY_{name.upper()}"
        parser.add_argument(
            f"--api-key-{name}", default=os.environ.get(variable, ""), help=f"default: {variable} of the environment"
        )
    parser.add_argument("--chat", action="store_true", help="as chat completions instead of completions")
    parser.add_argument("--stop-at-eos", action="store_true", help="as bench serve")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--rate", type=positive_float, default=1.0, help="requests a second")
    parser.add_argument("--requests", type=positive_int, default=60, help="of each round")
    parser.add_argument("--warm-up", type=positive_int, default=10, help="requests of the round that does not count")
    parser.add_argument("--max-tokens", type=positive_int, default=64, help="of an answer, at most")
    parser.add_argument("--set", dest="shape", action="append", default=[], metavar="NAME=VALUE", help="as bench serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=positive_float, default=120.0, help="of each request")
    parser.add_argument("--slo-ttft-ms", type=positive_float, default=2_000.0)
    parser.add_argument("--slo-itl-ms", type=positive_float, default=100.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    try:
        rounds = run_rounds(asked)
    except HeadraceError as error:
        raise SystemExit(str(error)) from error
    if not rounds:
        raise SystemExit("interrupted before a round was whole")
    for remark in unfair(rounds):
        print(remark, file=sys.stderr)
    rows = compare(rounds)
    if asked.json:
        reports = [{"a": each.a.as_json(), "b": each.b.as_json()} for each in rounds]
        print(json.dumps({"rows": [asdict(row) for row in rows], "rounds": reports}))
        return
    print(f"A: {rounds[0].a.endpoint}, {rounds[0].a.model}\nB: {rounds[0].b.endpoint}, {rounds[0].b.model}")
    print(f"{len(rounds)} rounds of {asked.requests} requests at {asked.rate:g} a second; medians over the rounds")
    print(f"{'':20} {'A':>12} {'B':>12} {'A/B':>8} {'least':>8} {'largest':>8}")
    for row in rows:
        ratios = " ".join(f"{shown(each, '.2f'):>8}" for each in (row.ratio, row.ratio_min, row.ratio_max))
        print(f"{row.figure:20} {shown(row.a, ',.3g'):>12} {shown(row.b, ',.3g'):>12} {ratios}")


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def run_rounds(asked: argparse.Namespace) -> list[Round]:
    """All rounds that were whole: Ctrl-C ends the run with those."""
    a, b = (
        ServingEndpoint(
            url=url, model=model, chat=asked.chat, access={"api_key": api_key}, stops_at_eos=asked.stop_at_eos
        )
        for url, model, api_key in (
            (asked.a, asked.model_a, asked.api_key_a),
            (asked.b, asked.model_b, asked.api_key_b),
        )
    )
    workload = Workload(
        rate=asked.rate,
        shape=tuple(asked.shape),
        output_tokens_max=asked.max_tokens,
        context_tokens_max=asyncio.run(shorter_context(a, b)),
    )
    slo = Slo(ttft_ms=asked.slo_ttft_ms, itl_ms=asked.slo_itl_ms)
    rounds: list[Round] = []
    for number in range(asked.rounds + 1):
        bounds = LoadBounds(
            requests_max=asked.requests if number else asked.warm_up, duration_s=None, timeout_s=asked.timeout_s
        )
        answered = []
        for name, endpoint in (("A", a), ("B", b)):
            report = reporter(f"round {number}, {name}" if number else f"warm-up, {name}")
            its_own = replace(workload, seed=asked.seed + number)
            answered.append(measure_serving(endpoint, its_own, bounds=bounds, slo=slo, report=report))
            if answered[-1].interrupted:
                return rounds
        if number:
            rounds.append(Round(*answered))
    return rounds


async def shorter_context(a: ServingEndpoint, b: ServingEndpoint) -> int | None:
    """Tokens that fit both servers' contexts; None where neither says."""
    told = []
    for endpoint in (a, b):
        async with opened(endpoint) as (_, model):
            told.append(model.context_tokens_max)
    return min((each for each in told if each), default=None)


def reporter(prefix: str) -> Callable[[str], None]:
    return lambda line: print(f"{prefix}: {line}", file=sys.stderr)


def compare(rounds: Sequence[Round]) -> list[Compared]:
    """A row for each figure."""
    rows = []
    for name, figure in FIGURES.items():
        pairs = [(figure(each.a.tally), figure(each.b.tally)) for each in rounds]
        ratios = [a / b for a, b in pairs if a is not None and b]
        rows.append(
            Compared(
                figure=name,
                a=median_of(a for a, _ in pairs),
                b=median_of(b for _, b in pairs),
                ratio=median_of(ratios),
                ratio_min=min(ratios, default=None),
                ratio_max=max(ratios, default=None),
            )
        )
    return rows


def median_of(values: Iterable[float | None]) -> float | None:
    """Of those that were measured."""
    measured = [each for each in values if each is not None]
    return median(measured) if measured else None


def unfair(rounds: Sequence[Round]) -> list[str]:
    """What a reader must know before the ratios mean anything."""
    remarks = []
    for number, each in enumerate(rounds, start=1):
        for name, report in (("A", each.a), ("B", each.b)):
            remarks += [f"round {number}, {name}: {remark}" for remark in report.remarks()]
        for what, a, b in (
            ("prompt", each.a.tally.prompt_tokens, each.b.tally.prompt_tokens),
            ("output", each.a.tally.completion_tokens, each.b.tally.completion_tokens),
        ):
            if a != b:
                remarks.append(
                    f"round {number}: A counted {a:,} {what} tokens and B {b:,}: they did not do the same work"
                )
    return remarks


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
