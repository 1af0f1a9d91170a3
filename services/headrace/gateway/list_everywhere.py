"""What every holder says it keeps of what a selector means, in one answer with each holder's error."""

import functools
from collections.abc import Sequence

import grpc

from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError
from headrace.core.front_door_limits import DECODED_BLOCKS_OF_JOB_MAX
from headrace.core.generation import EvictSelector
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.gateway.fleet import IS_ELSEWHERE, TIMEOUT_S, Fleet, all_of
from headrace.gateway.name_accounts import account_of
from headrace.gateway.tokenize_prompt import PromptTokenizer
from headrace.wire.render import render_block, render_selector
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2


async def list_everywhere(
    fleet: Fleet, selectors: Sequence[EvictSelector], *, limit: int, holders: Sequence[str] = ()
) -> admin_pb2.ListBlocksReply:
    """At most `limit` blocks of all holders (or of those named), and how many there are in all."""
    nodes, workers = await fleet.holders(holders)

    async def ask(node: StoreNodeRecord) -> admin_pb2.ListBlocksReply:
        merged = admin_pb2.ListBlocksReply()
        try:
            for selector in selectors:
                asked = admin_pb2.ListBlocksRequest(selector=render_selector(selector), limit=limit)
                reply = await fleet.cache_stub(node).ListBlocks(asked, timeout=TIMEOUT_S)
                merged.blocks.extend(reply.blocks)
                merged.total_blocks += reply.total_blocks
        except grpc.aio.AioRpcError as failed:
            merged.errors.add(holder=node.holder_id, error=message_of(error_of_call(failed)))
        return merged

    work = [ask(node) for node in nodes]
    for worker in workers:
        work.append(_list_on_worker(fleet, worker, fleet.for_worker(worker, selectors), limit))
    whole = admin_pb2.ListBlocksReply()
    for reply in await all_of(work):
        whole.blocks.extend(reply.blocks[: limit - len(whole.blocks)])
        whole.errors.extend(reply.errors)
        whole.total_blocks += reply.total_blocks
    for holder in fleet.elsewhere(holders, selectors):
        whole.errors.add(holder=holder, error=IS_ELSEWHERE)
    return whole


async def name_blocks(fleet: Fleet, reply: admin_pb2.ListBlocksReply, *, with_text: bool) -> None:
    """Fill in each block's account, its model and, if asked for, its text. Blocks of a model that no live worker serves
    keep none of them: only workers tell which model a namespace is of."""
    by_namespace = {w.namespace.id: w for w in fleet.service.table.records()}
    namespace_to_account = fleet.namespace_to_account()
    path_to_blocks: dict[str, list[admin_pb2.BlockEntry]] = {}
    for block in reply.blocks:
        block.tenant = account_of(block, namespace_to_account)
        worker = by_namespace.get(block.base_namespace)
        if worker is not None:
            block.model = worker.model
            path_to_blocks.setdefault(worker.model_path, []).append(block)
    path_to_blocks.pop("", None)  # of workers that do not say where their tokenizer lies
    if with_text:
        tokenizers, deadline = fleet.service.tokenizers, Deadline.after(TIMEOUT_S, fleet.service.clock)
        for path, blocks in path_to_blocks.items():
            tokenizer = await tokenizers.get(path, deadline=deadline)
            for start in range(0, len(blocks), DECODED_BLOCKS_OF_JOB_MAX):
                some = blocks[start : start + DECODED_BLOCKS_OF_JOB_MAX]
                decode = functools.partial(_decode, some, tokenizer)
                for block, text in zip(some, await tokenizers.run(decode, deadline=deadline), strict=True):
                    block.text = text


def _decode(blocks: Sequence[admin_pb2.BlockEntry], tokenizer: PromptTokenizer) -> list[str]:
    return [tokenizer.decode(tuple(block.token_ids)) for block in blocks]


async def _list_on_worker(
    fleet: Fleet, worker: WorkerRecord, selectors: Sequence[EvictSelector], limit: int
) -> admin_pb2.ListBlocksReply:
    reply = admin_pb2.ListBlocksReply()
    try:
        for selector in selectors:
            listing = await fleet.list_device(worker, selector, limit=limit - len(reply.blocks))
            reply.blocks.extend(render_block(block) for block in listing.blocks)
            reply.total_blocks += listing.total_blocks
    except HeadraceError as error:
        reply.errors.add(holder=worker.holder_id, error=message_of(error))
    return reply
