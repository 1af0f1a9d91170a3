"""Requests to a live system whose answers are known beforehand, and a load of them while something is done to it."""

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from local_system import PATIENCE_S, LocalSystem, metrics_page, wait_until

from headrace.client.values import COLD, CacheOptions, GenerateResult, Sampling
from headrace.core.errors import HeadraceError
from headrace.core.limits import LEASE_TTL_MS

EIGHT = Sampling(max_tokens=8, ignore_eos=True)
ANY = CacheOptions()
assert LEASE_TTL_MS / 1000 < PATIENCE_S


def make_token_ids(count: int, *, seed: int) -> list[int]:
    """Tokens of the tiny model that no other seed begins with; none of its special tokens."""
    chosen = random.Random(seed)
    return [chosen.randrange(10, 290) for _ in range(count)]


def ask(
    system: LocalSystem, token_ids: list[int], *, cache: CacheOptions = ANY, timeout_s: float = PATIENCE_S
) -> GenerateResult:
    """Eight greedy tokens. One that is held to its deadline fails: it is far beyond what a busy machine takes."""
    return system.client.generate(token_ids, sampling=EIGHT, cache=cache, timeout_s=timeout_s)


def ask_all(system: LocalSystem, prompts: list[list[int]], *, cache: CacheOptions = ANY) -> list[GenerateResult]:
    """Eight at a time; results in the prompts' order."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: ask(system, prompt, cache=cache), prompts))


def cold_ids(system: LocalSystem, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The answers with nothing taken from the cache and nothing left in it."""
    return [result.token_ids for result in ask_all(system, prompts, cache=COLD)]


@dataclass
class LoadOutcome:
    """What came of a load's requests."""

    right: int = 0
    wrong: int = 0
    hits: int = 0
    errors: list[str] = field(default_factory=list)


def load_while(
    system: LocalSystem, prompts: list[list[int]], do: Callable[[], None], *, after_s: float = 0.5
) -> LoadOutcome:
    """Four callers ask in turn, from before `do` begins until some time after it has ended; answers are compared."""
    expected, outcome = cold_ids(system, prompts), LoadOutcome()
    ended, lock = threading.Event(), threading.Lock()

    def call(number: int) -> None:
        while not ended.is_set():
            number = (number + 1) % len(prompts)
            try:
                result = ask(system, prompts[number])
            except HeadraceError as error:
                with lock:
                    outcome.errors.append(f"{type(error).__name__}: {error}")
                continue
            with lock:
                outcome.right += result.token_ids == expected[number]
                outcome.wrong += result.token_ids != expected[number]
                outcome.hits += result.usage.cached.total > 0

    with ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(call, number) for number in range(4)]
        try:
            do()
            time.sleep(after_s)
        finally:
            ended.set()
        for caller in callers:
            caller.result()
    return outcome


def wait_until_at_rest(system: LocalSystem, *, dead_claims: bool = False) -> None:
    """Nothing runs, waits, is leased or reserved, and every holder's blocks add up to what it has.

    However late on a busy machine; but no claim may have to run out for it, as one does that nobody ends: such are left
    only by a worker that was killed or stood still in the middle of a load (dead_claims).
    """

    moving: list[str] = []
    before = lapsed_claims(system)

    def at_rest() -> bool:
        busy = [w for w in system.client.status().workers if w.running or w.waiting]
        open_books = [
            b
            for b in system.client.stat()
            if b.error or b.leased_blocks or b.reserved_blocks or b.free_blocks + b.committed_blocks != b.total_blocks
        ]
        moving[:] = [str(each) for each in (*busy, *open_books)]
        return not moving

    try:
        wait_until(at_rest, what="the system at rest, its books balanced")
    except AssertionError as late:
        raise AssertionError(f"{late}: {moving}") from None
    assert dead_claims or lapsed_claims(system) == before, "claims were left to run out"


def lapsed_claims(system: LocalSystem) -> dict[str, float]:
    """How many claims of each node ran out since it started, by kind."""
    counter = re.compile(r"^headrace_store_lapsed_claims_total{kind=\"(\w+)\"} (\S+)$", re.MULTILINE)
    nodes = system.client.status().store_nodes
    lapsed = {
        f"{node.node_id} {kind}": float(count)
        for node in nodes
        for kind, count in counter.findall(metrics_page(node.metrics_port))
    }
    assert len(lapsed) == 2 * len(nodes)
    return lapsed
