"""Whether a live system answers the same from every place where it caches: each worker, each source, each other host.

Answers are compared with cold ones by their tokens and by the log-probabilities of the likeliest ones at each place,
which differ when any bit of the logits that matters does.

Owns which requests are sent to find out, and what their answers say. It goes by the client's API alone, so it holds for
any system that a client reaches, on one host or on many; what one engine does to the last bit is `verify/`'s.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from headrace.client import CacheOptions, GenerateResult, HeadraceClient, Sampling, ServedModel
from headrace.client.admin_values import WorkerStatus
from headrace.core.block import CacheSource
from headrace.core.generation import TokenLogprob
from headrace.core.limits import LOGPROBS_MAX

# Blocks of each prompt: some kilobytes to some megabytes, over in a moment on any link. What is to come from another
# host is longer, since a gateway has a prompt computed that takes no longer than its fetching.
PROMPT_BLOCKS, PROMPT_BLOCKS_ABROAD = 6, 24
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
    source: str  # "cold", a CacheSource's name, or "hand_off": a prefill worker computed them for this very request
    computed_on: str  # the store node beside the worker that had computed the blocks; "" for cold
    reused_tokens: int
    expected_tokens: int
    ttft_ms: float
    equal: bool  # to the cold answer, token for token
    same_bits: bool  # so are the log-probabilities of the likeliest tokens at each place


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What all of them say."""

    checks: tuple[Check, ...]

    @property
    def equal(self) -> bool:
        """Whether no answer differs from its cold one."""
        return all(check.equal for check in self.checks)

    @property
    def same_bits(self) -> bool:
        """Whether no log-probability does."""
        return all(check.same_bits for check in self.checks)

    @property
    def whole(self) -> bool:
        """Whether each source gave all that it had been given."""
        return all(check.reused_tokens == check.expected_tokens for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        checks = [asdict(check) for check in self.checks]
        return {"equal": self.equal, "same_bits": self.same_bits, "whole": self.whole, "checks": checks}

    def verdict(self) -> str:
        """The outcome in a sentence."""
        if not self.equal:
            return "an answer from the cache DIFFERS from the cold one"
        bits = "bit for bit" if self.same_bits else "token for token, but NOT in all bits"
        answers = f"all {len(self.checks)} answers are equal to the cold ones, {bits}"
        return answers if self.whole else f"{answers}; some reused less than was there"


def verify_cache(client: HeadraceClient, *, model: ServedModel, report: Callable[[str], None]) -> CacheReport:
    """Ask every worker that decodes for new prompts: cold, from its own memory, from its host's store node, from that
    of each other host, and handed over by each prefill worker.

    report: gets a line for each worker. Leaves the prompts in the cache, where they age as any. Raises what the client
    does, WorkerUnavailable when a worker goes meanwhile."""
    workers = [worker for worker in client.status().workers if worker.model == model.id]
    decoders = [worker for worker in workers if worker.role != "prefill"]
    checks: list[Check] = []
    for number, worker in enumerate(decoders, start=1):
        report(f"[{number}/{len(decoders)}] worker {worker.worker_id} beside store node {worker.store_node}")
        # Machines whose arithmetic differs have namespaces of their own and share nothing.
        alike = [other for other in workers if other.namespace == worker.namespace]
        checks += _from_its_host(_Asked(client, model, worker, blocks=PROMPT_BLOCKS))
        # One worker of each host: what it computes lies in the store node that all workers there share.
        hosts = {other.store_node: other for other in alike if other in decoders}
        for other in hosts.values():
            if other.store_node != worker.store_node:
                checks.append(_from_another_host(_Asked(client, model, worker, blocks=PROMPT_BLOCKS_ABROAD), other))
        for prefill in alike:
            if prefill not in decoders:
                checks.append(_handed_over(_Asked(client, model, worker, blocks=PROMPT_BLOCKS), prefill))
    return CacheReport(tuple(checks))


def _from_its_host(asked: "_Asked") -> list[Check]:
    cold = asked.cold()
    asked.compute(asked.worker)
    return [cold, *(asked.check(source, asked.worker) for source in (CacheSource.DEVICE, CacheSource.SHARED_MEMORY))]


def _from_another_host(asked: "_Asked", other: WorkerStatus) -> Check:
    asked.cold()
    asked.compute(other)
    return asked.check(CacheSource.GRPC, other)


def _handed_over(asked: "_Asked", prefill: WorkerStatus) -> Check:
    asked.cold()
    return asked.hand_off(prefill)


class _Asked:
    """One prompt that nobody has sent before, asked of one worker again and again."""

    def __init__(self, client: HeadraceClient, model: ServedModel, worker: WorkerStatus, *, blocks: int) -> None:
        self._client = client
        self._model = model.id
        self.worker = worker
        fitting = (model.context_tokens_max - ANSWER_TOKENS - 1) // model.block_tokens
        self._full_tokens = model.block_tokens * min(blocks, fitting)
        self._prompt = random.SystemRandom().choices(TOKEN_IDS, k=self._full_tokens + 1)
        self._cold: GenerateResult | None = None

    def cold(self) -> Check:
        """The yardstick, which comes first: nothing is read, nothing is left."""
        cache = CacheOptions(sources=frozenset(), publish=False, decode_worker=self.worker.worker_id)
        self._cold = self._ask(cache)
        return self._check("cold", "", self._cold, 0)

    def compute(self, worker: WorkerStatus) -> None:
        """Have it computed by a worker, and stored beside it."""
        self._ask(CacheOptions(decode_worker=worker.worker_id))

    def check(self, source: CacheSource, computed_by: WorkerStatus) -> Check:
        """The answer from this source alone; asked again for a while when the source gives less than all."""
        cache = CacheOptions(sources=frozenset({source}), publish=False, decode_worker=self.worker.worker_id)
        for attempt in range(ATTEMPTS):
            time.sleep(ATTEMPT_EVERY_S if attempt else 0.0)
            result = self._ask(cache)
            check = self._check(source.value, computed_by.store_node, result, result.usage.cached.by_source()[source])
            if check.reused_tokens == check.expected_tokens or not check.equal:
                break
        return check

    def hand_off(self, prefill: WorkerStatus) -> Check:
        """The answer to the prompt when a prefill worker computes it meanwhile; one that is late is done without."""
        pair = CacheOptions(decode_worker=self.worker.worker_id, prefill_worker=prefill.worker_id)
        result = self._ask(pair)
        handed = self._full_tokens if result.prefill_worker == prefill.worker_id else 0
        return self._check("hand_off", prefill.store_node, result, handed)

    def _ask(self, cache: CacheOptions) -> GenerateResult:
        sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, logprobs=LOGPROBS_MAX)
        return self._client.generate(
            self._prompt, model=self._model, sampling=sampling, cache=cache, timeout_s=REQUEST_TIMEOUT_S
        )

    def _check(self, source: str, computed_on: str, result: GenerateResult, reused_tokens: int) -> Check:
        assert self._cold is not None
        return Check(
            worker=self.worker.worker_id,
            store_node=self.worker.store_node,
            source=source,
            computed_on=computed_on,
            reused_tokens=reused_tokens,
            expected_tokens=self._full_tokens if computed_on else 0,
            ttft_ms=round(result.ttft_ms, 1),
            equal=_ids(result) == _ids(self._cold),
            same_bits=_bits(result) == _bits(self._cold),
        )


def _ids(result: GenerateResult) -> list[int]:
    return [token.token_id for token in result.tokens]


def _bits(result: GenerateResult) -> list[tuple[float | None, tuple[TokenLogprob, ...]]]:
    return [(token.logprob, token.top_logprobs) for token in result.tokens]
