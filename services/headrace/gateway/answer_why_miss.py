"""Gather what explains a miss: ask the index and every holder about one prompt's chain."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.core.block import Chain, HashedPrompt, Namespace, NamespaceId
from headrace.core.clock import Deadline
from headrace.core.errors import IndexUnavailable, InvalidRequest
from headrace.core.generation import EvictSelector
from headrace.core.members import StoreNodeRecord
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.explain_miss import HolderAnswer, MissEvidence, RemovedBlock, ServedRequest, explain_miss
from headrace.gateway.fleet import TIMEOUT_S, ask_each
from headrace.gateway.prepare_request import hash_for, run_hashing
from headrace.gateway.recent_prompts import RecentPrompt
from headrace.gateway.service import GatewayService
from headrace.gateway.tokenize_prompt import tokenize_prompt
from headrace.wire.parse import parse_admin_prompt
from headrace.wire.v1 import admin_pb2

ListEverywhere = Callable[[Sequence[EvictSelector]], Awaitable[admin_pb2.ListBlocksReply]]


async def answer_why_miss(
    request: admin_pb2.WhyMissRequest,
    *,
    service: GatewayService,
    scope: AdminScope,
    stub_of: Callable[[StoreNodeRecord], Any],
    list_everywhere: ListEverywhere,
) -> admin_pb2.WhyMissReply:
    """Explain as of now. Raises InvalidRequest (a request id that is not remembered here) and UnknownModel."""
    await service.refresh()
    recent, namespace = await _find(request, service, scope)
    prompt = recent.prompt
    now_ms = service.clock.unix_ms()
    nodes = await service.membership.store_nodes()
    asked = admin_pb2.ExplainRequest(namespace=prompt.namespace, chain=prompt.chain)

    async def explain(node: StoreNodeRecord) -> HolderAnswer:
        return _answer(await stub_of(node).Explain(asked, timeout=TIMEOUT_S), now_ms)

    told = await ask_each(nodes, explain)
    answers, errors = told.by_holder, told.errors
    if prompt.chain:
        head = EvictSelector(namespace=prompt.namespace, block_hashes=prompt.chain[:1], tier="device")
        listing = await list_everywhere((head,))
        for worker in service.table.records():
            on_it = {block.block_hash for block in listing.blocks if block.holder == worker.holder_id}
            answers[worker.holder_id] = HolderAnswer(_run(prompt.chain, on_it))
        errors |= {error.holder: error.error for error in listing.errors}
    indexed = await _indexed(service, prompt)
    best = max((answer.held_blocks for answer in answers.values()), default=0)
    elsewhere = await _elsewhere(prompt, best, list_everywhere) if scope.sees_all else {}
    live = [*(node.holder_id for node in nodes), *(worker.holder_id for worker in service.table.records())]
    evidence = MissEvidence(
        chain=prompt.chain,
        num_tokens=len(prompt.token_ids),
        namespace=namespace,
        answers={holder: answer for holder, answer in answers.items() if holder not in errors},
        indexed=indexed,
        gone_s={h: (now_ms - seen) / 1_000 for h, seen in service.seen_holders.gone(live).items()},
        elsewhere=elsewhere,
        live=[worker.namespace for worker in service.table.records()],
        served=None
        if recent.cached_tokens is None
        else ServedRequest(recent.cached_tokens, max(0.0, (now_ms - recent.came_unix_ms) / 1_000)),
    )
    return _render(evidence, recent, errors)


async def _find(
    request: admin_pb2.WhyMissRequest, service: GatewayService, scope: AdminScope
) -> tuple[RecentPrompt, Namespace]:
    """The prompt as a request of this caller would look it up, or as the named request did."""
    if request.request_id:
        recent = service.recent_prompts.find(request.request_id)
        if recent is None or not (scope.sees_all or recent.trust_group == scope.tenant.trust_group):
            why = f"request {request.request_id[:64]!r} is not among the last that this gateway served; give its prompt"
            raise InvalidRequest(why, param="request_id")
        return recent, service.table.served(recent.model, None).namespace
    served = service.table.served(request.model, None)
    tokenizers, deadline = service.tokenizers, Deadline.after(TIMEOUT_S, service.clock)
    token_ids = await tokenize_prompt(
        parse_admin_prompt(request),
        model_path=served.model_path,
        room=served.room,
        tokenizers=tokenizers,
        deadline=deadline,
    )
    group = scope.tenant.trust_group
    hashing = functools.partial(hash_for, served.namespace, token_ids, cache_salt=request.cache_salt, trust_group=group)
    prompt = await run_hashing(hashing, len(token_ids), tokenizers=tokenizers, deadline=deadline)
    return RecentPrompt(served.name, group, prompt), served.namespace


def _answer(reply: admin_pb2.ExplainReply, now_ms: int) -> HolderAnswer:
    removed = [
        RemovedBlock(removal.position, removal.reason, max(0.0, (now_ms - removal.unix_ms) / 1_000))
        for removal in reply.removals
    ]
    return HolderAnswer(reply.held_blocks, tuple(removed), max(0.0, (now_ms - reply.remembers_since_unix_ms) / 1_000))


def _run(chain: Chain, held: set[bytes]) -> int:
    return next((position for position, block_hash in enumerate(chain) if block_hash not in held), len(chain))


async def _indexed(service: GatewayService, prompt: HashedPrompt) -> dict[str, int] | None:
    try:
        match = await service.index.longest_prefix(prompt.namespace, prompt.chain)
    except IndexUnavailable:
        return None
    return {str(holder): count for holder, count in match.num_blocks_by_holder.items()}


async def _elsewhere(
    prompt: HashedPrompt, best: int, list_everywhere: ListEverywhere
) -> dict[NamespaceId, NamespaceId]:
    """Other namespaces that hold the tokens up to the first missing block, each with the one it was narrowed from."""
    if best >= len(prompt.chain):
        return {}
    token_ids = prompt.token_ids[: (best + 1) * prompt.block_tokens]
    listing = await list_everywhere((EvictSelector(prefix_token_ids=token_ids),))
    return {
        NamespaceId(block.namespace): NamespaceId(block.base_namespace)
        for block in listing.blocks
        if block.namespace != prompt.namespace
    }


def _render(evidence: MissEvidence, recent: RecentPrompt, errors: dict[str, str]) -> admin_pb2.WhyMissReply:
    reply = admin_pb2.WhyMissReply(
        model=recent.model,
        namespace=recent.prompt.namespace,
        prompt_tokens=evidence.num_tokens,
        block_tokens=recent.prompt.block_tokens,
        num_blocks=len(evidence.chain),
    )
    indexed = evidence.indexed or {}
    for holder, answer in evidence.answers.items():
        reply.runs.add(holder=holder, held_blocks=answer.held_blocks, indexed_blocks=indexed.get(holder, 0))
    for reason in explain_miss(evidence):
        reply.reasons.add(
            kind=reason.kind,
            detail=reason.detail,
            holder=reason.holder,
            first_block=reason.first_block,
            num_blocks=reason.num_blocks,
        )
    for holder, error in errors.items():
        reply.errors.add(holder=holder, error=error)
    return reply
