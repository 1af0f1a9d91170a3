"""How well a running gateway predicts times to first token: prompts of many lengths, some sharing prefixes.

    python benchmarks/predict_ttft.py --address 127.0.0.1:9000 [--requests N] [--at-once N] [--seconds N] [--json]

Each request's prediction, as it was when the request was placed, is read back with `explain` and compared with what the
gateway measured. The first tenth warms up: nothing was measured before. Prints errors; judges nothing.
"""

import argparse
import json
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from headrace.client import HeadraceClient, RouteExplanation, Sampling

VOCABULARY = range(100, 1_000)  # token ids that any vocabulary has
SHARED_TOKENS = (64, 256, 512)
OWN_TOKENS = (8, 40, 150, 400, 900)
OUTPUT_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:9000")
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--at-once", type=int, default=1, help="requests under way at the same time")
    parser.add_argument("--seconds", type=float, default=3_600.0, help="begin no request after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prompts = make_prompts(arguments.requests, random.Random(arguments.seed))
    load_before = os.getloadavg()[0]
    with HeadraceClient(arguments.address) as client, ThreadPoolExecutor(arguments.at_once) as pool:
        end_s = time.monotonic() + arguments.seconds
        asked = pool.map(lambda prompt: ask(client, prompt) if time.monotonic() < end_s else None, prompts)
        found = [each for each in asked if each is not None]
    measured = found[len(found) // 10 :]
    rows = [summary(name, kind) for name, kind in by_kind(measured).items() if kind]
    load = {"before": load_before, "after": os.getloadavg()[0], "cores": os.cpu_count()}
    if arguments.json:
        print(json.dumps({"rows": rows, "machine_load": load}))
        return
    print(f"{'requests':>24} {'count':>6} {'ttft p50':>10} {'|error| p50':>12} {'p90':>8} {'bias p50':>9}")
    for row in rows:
        print(
            f"{row['requests']:>24} {row['count']:>6} {1e3 * row['ttft_s_p50']:>7.0f} ms {row['error_p50']:>11.0%}"
            f" {row['error_p90']:>8.0%} {row['bias_p50']:>+9.0%}"
        )
    print(f"load of the machine: {load['before']:.1f} before, {load['after']:.1f} after, on {load['cores']} cores")


def make_prompts(count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Half of them begin with one of a few shared prefixes."""
    shared = [tuple(rng.choices(VOCABULARY, k=length)) for length in SHARED_TOKENS for _ in range(2)]
    heads = [rng.choice(shared) if rng.random() < 0.5 else () for _ in range(count)]
    return [head + tuple(rng.choices(VOCABULARY, k=rng.choice(OWN_TOKENS))) for head in heads]


def ask(client: HeadraceClient, prompt: tuple[int, ...]) -> RouteExplanation:
    """One answer, and how it was predicted."""
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    return client.explain_route(client.generate(prompt, sampling=sampling).request_id)


def by_kind(found: list[RouteExplanation]) -> dict[str, list[RouteExplanation]]:
    """All, and apart by what the workers did."""
    return {
        "all": found,
        "computed where decoded": [each for each in found if not each.chosen.prefill_worker],
        "handed over": [each for each in found if each.chosen.prefill_worker],
        "a part reused": [each for each in found if each.outcome.cached_tokens],
    }


def summary(name: str, found: list[RouteExplanation]) -> dict[str, object]:
    """Errors relative to what was measured."""
    relative = [each.predicted_ttft_s / each.outcome.ttft_s - 1 for each in found if each.outcome.ttft_s]
    errors = sorted(abs(each) for each in relative)
    return {
        "requests": name,
        "count": len(errors),
        "ttft_s_p50": statistics.median(each.outcome.ttft_s for each in found if each.outcome.ttft_s),
        "error_p50": statistics.median(errors),
        "error_p90": errors[int(0.9 * len(errors))],
        "bias_p50": statistics.median(relative),
    }


if __name__ == "__main__":
    main()
