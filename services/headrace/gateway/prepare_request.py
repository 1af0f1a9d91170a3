"""A client's request as workers take it: tokenised, hashed, and with all that the caller left open settled.

Knows the model that is served and the tenant who asks; not the workers, and nothing of what is under way.
"""

import functools
import secrets
from collections.abc import Callable
from dataclasses import replace

from headrace.core.block import HashedPrompt, Namespace, hash_prompt
from headrace.core.clock import Deadline
from headrace.core.errors import ContextExceeded, InvalidRequest
from headrace.core.front_door_limits import HASHED_ON_LOOP_TOKENS_MAX
from headrace.core.generation import CacheControl, GenerateRequest, RequestId, SamplingParams
from headrace.core.limits import OUTPUT_TOKENS_DEFAULT
from headrace.core.sequence_room import SequenceRoom
from headrace.core.tenants import Tenant
from headrace.gateway.tokenize_prompt import Tokenizers, tokenize_prompt
from headrace.gateway.worker_table import ServedModel
from headrace.wire.client_request import ClientRequest, SamplingOptions


async def prepare_request(
    request: ClientRequest, tenant: Tenant, served: ServedModel, *, tokenizers: Tokenizers, deadline: Deadline
) -> list[GenerateRequest]:
    """One GenerateRequest for each choice, all with the same prompt and id, whose seeds follow one another.

    Raises as `tokenize_prompt`, ContextExceeded for more output than fits, InvalidRequest for a priority that the
    tenant may not have.
    """
    priority, cache = settle_priority(request.priority, tenant), settle_retention(request.cache, tenant)
    token_ids = await tokenize_prompt(
        request.prompt, model_path=served.model_path, room=served.room, tokenizers=tokenizers, deadline=deadline
    )
    sampling = settle_sampling(request.sampling, prompt_tokens=len(token_ids), room=served.room)
    hashing = functools.partial(
        hash_for, served.namespace, token_ids, cache_salt=request.cache_salt, trust_group=tenant.trust_group
    )
    prompt = await run_hashing(hashing, len(token_ids), tokenizers=tokenizers, deadline=deadline)
    whole = GenerateRequest(
        request_id=RequestId(secrets.token_hex(12)),
        model=served.name,
        prompt=prompt,
        sampling=sampling,
        cache=cache,
        trust_group=tenant.trust_group,
        cache_salt=request.cache_salt,
        decode_worker=request.decode_worker,
        prefill_worker=request.prefill_worker,
        priority=priority,
    )
    seeds = [(sampling.seed + choice) % 2**64 for choice in range(request.choices)]
    return [replace(whole, sampling=replace(sampling, seed=seed)) for seed in seeds]


async def run_hashing(
    hashing: Callable[[], HashedPrompt], num_tokens: int, *, tokenizers: Tokenizers, deadline: Deadline
) -> HashedPrompt:
    """Hash a prompt of so many tokens: a long one in a tokenizer's thread."""
    is_long = num_tokens > HASHED_ON_LOOP_TOKENS_MAX
    return await tokenizers.run(hashing, deadline=deadline) if is_long else hashing()


def hash_for(
    namespace: Namespace, token_ids: tuple[int, ...], *, cache_salt: str = "", trust_group: str = ""
) -> HashedPrompt:
    """Hash a prompt under a model's namespace, narrowed to the caller's trust group and by the caller's salt."""
    narrowed = namespace.narrowed(cache_salt, trust_group=trust_group)
    hashed = hash_prompt(
        narrowed.id, token_ids, block_tokens=namespace.layout.block_tokens, algorithm=namespace.hash_algorithm
    )
    wider = dict.fromkeys((namespace.id, namespace.narrowed("", trust_group=trust_group).id))
    return replace(hashed, narrowed_from=tuple(each for each in wider if each != narrowed.id))


def settle_retention(cache: CacheControl, tenant: Tenant) -> CacheControl:
    """The tenant's time to live for the blocks of a request that names none itself."""
    if tenant.ttl_s is None or cache.retention.ttl_s is not None:
        return cache
    return replace(cache, retention=replace(cache.retention, ttl_s=tenant.ttl_s))


def settle_priority(priority: int | None, tenant: Tenant) -> int:
    """A request's own priority, else the normal one or the tenant's highest, if that is lower."""
    if priority is None:
        return min(0, tenant.priority_max)
    if priority > tenant.priority_max:
        raise InvalidRequest(
            f"priority {priority} is above {tenant.priority_max}, the highest for tenant {tenant.name}; leave it out",
            param="priority",
        )
    return priority


def settle_sampling(options: SamplingOptions, *, prompt_tokens: int, room: SequenceRoom) -> SamplingParams:
    """Fill in what the caller left open: the output's bound (what fits, at most the default) and the seed (a draw)."""
    left = room.tokens_max - prompt_tokens
    assert left >= 1, "tokenize_prompt leaves room for one token"
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = min(left, options.max_tokens_default or OUTPUT_TOKENS_DEFAULT)
    if max_tokens > left:
        raise ContextExceeded(
            f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} make {prompt_tokens + max_tokens}, and at most"
            f" max_tokens {left} would fit: {room.why_not(prompt_tokens + max_tokens)}",
            tokens_max=room.tokens_max,
            param="max_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
        stop=options.stop,
        logprobs=options.logprobs,
        ignore_eos=options.ignore_eos,
    )
