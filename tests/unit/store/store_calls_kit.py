"""Publishing and reading through the ports, as workers do."""

from collections.abc import Sequence
from contextlib import aclosing

from store_kit import LAYOUT, make_header, payload_of

from headrace.core.block import HashedPrompt, KvLayout, payload_digest
from headrace.core.clock import Deadline, SystemClock
from headrace.core.ports import BlockSink, BlockSource, Reservation

CLOCK = SystemClock()


def deadline(seconds: float = 10) -> Deadline:
    return Deadline.after(seconds, CLOCK)


async def publish(sink: BlockSink, prompt: HashedPrompt, blocks: Sequence[int], layout: KvLayout = LAYOUT) -> int:
    """Reserve, fill and commit; how many blocks were stored."""
    stored = 0
    for outcome in await sink.reserve([make_header(prompt, i, layout) for i in blocks], deadline=deadline()):
        if isinstance(outcome, Reservation):
            outcome.buffer[:] = payload_of(outcome.header)
            await sink.commit(outcome, payload_xxh3=payload_digest(outcome.buffer), deadline=deadline())
            stored += 1
    return stored


async def read(source: BlockSource, prompt: HashedPrompt, *, first_block: int = 0) -> list[bytes]:
    """Every payload of the prompt that the node has, each checked against its header's checksum."""
    lease = await source.lease_prefix(prompt.namespace, prompt.chain, first_block=first_block, deadline=deadline())
    payloads = []
    async with aclosing(source.fetch_blocks(lease, deadline=deadline())) as views:
        async for view in views:
            assert payload_digest(view) == lease.headers[len(payloads)].payload_xxh3
            payloads.append(bytes(view))
    await source.release(lease)
    return payloads
