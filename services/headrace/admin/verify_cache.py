"""Whether a live system answers the same from every place where it caches: each worker, each source, each other host.

Owns which requests are sent to find out, and what their answers say. It goes by the client's API alone, so it holds for
any system that a client reaches, on one host or on many; what one engine does to the last bit is `verify/`'s.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.client import CacheOptions, GenerateResult, HeadraceClient, Sampling
from headrace.client.admin_values import WorkerStatus
from headrace.core.block import CacheSource

# Blocks of each prompt: some kilobytes to some megabytes, over in a moment on any link.
PROMPT_BLOCKS = 6
ANSWER_TOKENS = 16
# Token ids that every vocabulary has and that are not its special ones, as far as one can know.
TOKEN_IDS = range(10, 290)
# A gateway hears of new blocks a moment later than they can be read: this often a hit is waited for, so far apart.
ATTEMPTS = 20
ATTEMPT_EVERY_S = 0.25
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Check:
    """One answer: by which worker, from where its prompt's blocks came, and what it is worth."""

    worker: str
    store_node: str  # beside the worker
    source: str  # "cold", or a CacheSource's name
    computed_on: str  # the store node beside the worker that had computed the blocks; "" for cold
    cached_tokens: int
    expected_tokens: int
    ttft_ms: float
    equal: bool  # to the cold answer, token for token


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What all of them say."""

    checks: tuple[Check, ...]

    @property
    def equal(self) -> bool:
        """Whether no answer differs from its cold one."""
        return all(check.equal for check in self.checks)

    @property
    def whole(self) -> bool:
        """Whether each source gave all that it had been given."""
        return all(check.cached_tokens == check.expected_tokens for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"equal": self.equal, "whole": self.whole, "checks": [asdict(check) for check in self.checks]}

    def verdict(self) -> str:
        """The outcome in a sentence."""
        if not self.equal:
            return "an answer from the cache DIFFERS from the cold one"
        answers = f"all {len(self.checks)} answers are equal to the cold ones"
        return answers if self.whole else f"{answers}, but some found less in the cache than was there"


def verify_cache(
    client: HeadraceClient, *, model: str, block_tokens: int, report: Callable[[str], None]
) -> CacheReport:
    """Ask every worker that decodes for new prompts: cold, from its own memory, from its host's store node, and from
    the store node beside each other worker.

    report: gets a line for each worker. Leaves the prompts in the cache, where they age as any. Raises what the client
    does, WorkerUnavailable when a worker goes meanwhile."""
    workers = [worker for worker in client.status().workers if worker.role != "prefill" and worker.model == model]
    checks: list[Check] = []
    for number, worker in enumerate(workers, start=1):
        report(f"[{number}/{len(workers)}] worker {worker.worker_id} beside store node {worker.store_node}")
        asked = _Asked(client, model, worker, _prompt(block_tokens), block_tokens * PROMPT_BLOCKS)
        checks.append(asked.cold())
        asked.compute(worker)
        checks += [asked.check(CacheSource.DEVICE, worker), asked.check(CacheSource.SHARED_MEMORY, worker)]
        for other in workers:
            if other.store_node != worker.store_node:
                abroad = _Asked(client, model, worker, _prompt(block_tokens), block_tokens * PROMPT_BLOCKS)
                abroad.cold()
                abroad.compute(other)
                checks.append(abroad.check(CacheSource.GRPC, other))
    return CacheReport(tuple(checks))


class _Asked:
    """One prompt that nobody has sent before, asked of one worker again and again."""

    def __init__(
        self, client: HeadraceClient, model: str, worker: WorkerStatus, prompt: Sequence[int], full_tokens: int
    ) -> None:
        self._client = client
        self._model = model
        self._worker = worker
        self._prompt = prompt
        self._full_tokens = full_tokens
        self._cold: tuple[int, ...] = ()

    def cold(self) -> Check:
        """The yardstick: nothing is read, nothing is left."""
        result = self._ask(CacheOptions(sources=frozenset(), publish=False, decode_worker=self._worker.worker_id))
        self._cold = result.token_ids
        return self._check("cold", "", result, expected_tokens=0)

    def compute(self, worker: WorkerStatus) -> None:
        """Have it computed by a worker, and stored beside it."""
        self._ask(CacheOptions(decode_worker=worker.worker_id))

    def check(self, source: CacheSource, computed_by: WorkerStatus) -> Check:
        """The answer from this source alone; asked again for a while when the source gives less than all."""
        cache = CacheOptions(sources=frozenset({source}), publish=False, decode_worker=self._worker.worker_id)
        for attempt in range(ATTEMPTS):
            time.sleep(ATTEMPT_EVERY_S if attempt else 0.0)
            result = self._ask(cache)
            if result.usage.cached.by_source()[source] == self._full_tokens or result.token_ids != self._cold:
                break
        return self._check(source.value, computed_by.store_node, result, expected_tokens=self._full_tokens)

    def _ask(self, cache: CacheOptions) -> GenerateResult:
        return self._client.generate(
            self._prompt,
            model=self._model,
            sampling=Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
            cache=cache,
            timeout_s=REQUEST_TIMEOUT_S,
        )

    def _check(self, source: str, computed_on: str, result: GenerateResult, *, expected_tokens: int) -> Check:
        return Check(
            worker=self._worker.worker_id,
            store_node=self._worker.store_node,
            source=source,
            computed_on=computed_on,
            cached_tokens=result.usage.cached.total,
            expected_tokens=expected_tokens,
            ttft_ms=round(result.ttft_ms, 1),
            equal=result.token_ids == self._cold,
        )


def _prompt(block_tokens: int) -> list[int]:
    """So many full blocks and a token, never the same twice."""
    return random.SystemRandom().choices(TOKEN_IDS, k=block_tokens * PROMPT_BLOCKS + 1)
