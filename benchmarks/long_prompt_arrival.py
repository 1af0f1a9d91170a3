"""What a long prompt does to running streams: gaps between their tokens with it in chunks of several sizes, and whole.

    python benchmarks/long_prompt_arrival.py [--prompt N] [--streams N] [--chunks A,B] [--rounds N] [--json]

One engine of the default model in this process, without network or stores. The streams run; a prompt arrives; gaps
that end before it has its first token count. The last chunk size is the prompt's own: it is computed in one step. At
the end equal prompts arrive together, sharing their computation and each for itself. Judges nothing.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from headrace.config import EngineSettings, load_config
from headrace.core.block import HashAlgorithm, hash_prompt
from headrace.core.clock import Deadline, SystemClock
from headrace.core.generation import SamplingParams, TokenDelta
from headrace.engine.engine import Engine, FilledBlock
from headrace.engine.load_model import LoadedModel, load_model

CLOCK = SystemClock()
QUIET_TOKENS = 24  # each stream's tokens before the prompt arrives
TIMEOUT_S = 900.0
EQUAL_PROMPTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4_096, help="tokens of the prompt that arrives")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="tokens of each stream's own prompt")
    parser.add_argument("--chunks", default="64,256", help="prefill_chunk_tokens to compare with a whole prompt")
    parser.add_argument("--rounds", type=int, default=3, help="medians over so many, chunk sizes in turn")
    parser.add_argument("--equal", type=int, default=512, help="tokens of the equal prompts; 0: leave them out")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = load(arguments)
    chunks = [*map(int, filter(None, arguments.chunks.split(","))), arguments.prompt]
    found: dict[int, list[dict[str, float]]] = {chunk: [] for chunk in chunks}
    for number in range(arguments.rounds):
        for chunk in chunks:
            found[chunk].append(asyncio.run(arrive(model, arguments, chunk=chunk, seed=number)))
    rows = [
        {"chunk": chunk} | {key: statistics.median(f[key] for f in each) for key in each[0]}
        for chunk, each in found.items()
    ]
    equal = {}
    if arguments.equal:
        for name, reuse in (("shared", True), ("each", False)):
            tokens = make_tokens(model, arguments.equal, seed=99)
            equal[name] = asyncio.run(equal_prompts(model, tokens, reuse=reuse))
    if arguments.json:
        print(json.dumps({"rows": rows, "equal_prompts_s": equal, "machine_load": os.getloadavg()[0]}))
        return
    print(f"{'chunk':>7} {'before p50':>11} {'during p50':>11} {'p99':>9} {'longest':>9} {'its first token':>16}")
    for row in rows:
        name = f"{row['chunk']:.0f}" if row["chunk"] < arguments.prompt else "whole"
        print(
            f"{name:>7} {row['before_ms_p50']:>8.1f} ms {row['during_ms_p50']:>8.1f} ms {row['during_ms_p99']:>6.0f} ms"
            f" {row['during_ms_max']:>6.0f} ms {row['prompt_s']:>14.2f} s"
        )
    if equal:
        print(
            f"{EQUAL_PROMPTS} equal prompts of {arguments.equal} tokens at once, last first token:"
            f" {equal['shared']:.2f} s sharing, {equal['each']:.2f} s each for itself"
        )


def load(arguments: argparse.Namespace) -> LoadedModel:
    """The configured model, with a pool for everything at once."""
    config = load_config({}, environ=os.environ)
    block = config.engine.block_tokens
    room = (
        arguments.prompt + arguments.streams * (arguments.context + 4_096) + EQUAL_PROMPTS * (arguments.equal + block)
    )
    return load_model(
        config.model,
        replace(config.engine, pool_tokens=-(-room // block) * block),
        trust_group="",
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=lambda line: None,
    )


def make_tokens(model: LoadedModel, length: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 1_000), k=length)


async def arrive(model: LoadedModel, arguments: argparse.Namespace, *, chunk: int, seed: int) -> dict[str, float]:
    """One round: gaps of all streams before the prompt came and until its first token, and when that was."""
    block = model.kv.layout.block_tokens
    engine = Engine(model, EngineSettings(block_tokens=block, prefill_chunk_tokens=chunk), clock=CLOCK)
    engine.start()
    prompts = [make_tokens(model, arguments.context, seed=100 * seed + n + 1) for n in range(arguments.streams)]
    times: list[list[float]] = [[] for _ in prompts]
    streams = [
        asyncio.ensure_future(stream(engine, p, t, max_tokens=4_000)) for p, t in zip(prompts, times, strict=True)
    ]
    try:
        while min(map(len, times)) < QUIET_TOKENS:  # noqa: ASYNC110 - each token is an event of another task
            await asyncio.sleep(0.005)
        began_s = time.perf_counter()
        first: list[float] = []
        await stream(engine, make_tokens(model, arguments.prompt, seed=seed), first, max_tokens=1)
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await engine.stop()
    ends = [(a, b) for each in times for a, b in itertools.pairwise(each[4:])]
    before = [b - a for a, b in ends if b < began_s]
    during = sorted(b - a for a, b in ends if b >= began_s and a < first[0])
    return {
        "before_ms_p50": 1e3 * statistics.median(before),
        "during_ms_p50": 1e3 * statistics.median(during),
        "during_ms_p99": 1e3 * during[min(len(during) - 1, int(0.99 * len(during)))],
        "during_ms_max": 1e3 * during[-1],
        "prompt_s": first[0] - began_s,
    }


async def equal_prompts(model: LoadedModel, tokens: Sequence[int], *, reuse: bool) -> float:
    """Seconds until the last of several equal prompts has its first token."""
    engine = Engine(model, EngineSettings(block_tokens=model.kv.layout.block_tokens), clock=CLOCK)
    engine.start()
    times: list[list[float]] = [[] for _ in range(EQUAL_PROMPTS)]
    began_s = time.perf_counter()
    try:
        await asyncio.gather(*(stream(engine, tokens, each, max_tokens=1, reuse=reuse) for each in times))
    finally:
        await engine.stop()
    return max(each[0] for each in times) - began_s


async def stream(
    engine: Engine, token_ids: Sequence[int], times: list[float], *, max_tokens: int, reuse: bool = False
) -> None:
    """One request; when each of its tokens came goes into `times`."""
    namespace, block = engine.model.namespace, engine.kv.layout.block_tokens
    prompt = hash_prompt(namespace.id, token_ids, block_tokens=block, algorithm=namespace.hash_algorithm)
    deadline = Deadline.after(TIMEOUT_S, CLOCK)
    admission = await engine.admit(prompt, num_blocks=len(token_ids) // block + 1, use_device=reuse, deadline=deadline)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    cached_tokens = admission.num_device_blocks * block
    async with aclosing(engine.run(admission, cached_tokens=cached_tokens, sampling=sampling)) as events:
        async for event in events:
            if isinstance(event, TokenDelta):
                times.append(time.perf_counter())
            elif isinstance(event, FilledBlock):
                engine.pool.unref(event.block_id)


if __name__ == "__main__":
    main()
