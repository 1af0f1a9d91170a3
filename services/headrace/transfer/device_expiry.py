"""When blocks of a worker's own pool go by time: those whose time to live is over, and prefixes that an order names.

Owns the orders until their moment comes, and the task that looks. An order is kept whether or not the pool holds the
prefix now, since a request may load it from a store node before the moment. Times to live are the pool's own account;
when store nodes drop their copies is theirs to know. Orders end with the worker: one that starts later, or had no room
for an order, hears of it from the node that it loads the prefix from. What was heard is kept apart: it takes no room
from operators' own orders, and whatever they say of the same blocks next holds instead.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.core.block import BlockHash, Chain, NamespaceId, hash_prompt
from headrace.core.clock import Clock
from headrace.core.generation import ControlOutcome, ControlReport, EvictSelector
from headrace.core.limits import (
    DEVICE_EXPIRY_SCAN_MS,
    DEVICE_ORDER_TOKENS_MAX,
    DEVICE_ORDERS_MAX,
    DEVICE_ORDERS_PER_NAMESPACE_MAX,
    TTL_S_MIN,
)
from headrace.core.members import WorkerRecord
from headrace.engine.block_pool import BlockPool
from headrace.engine.list_device import pool_selection
from headrace.engine.pool_values import Selection


@dataclass(frozen=True, slots=True)
class _Order:
    """Blocks that go at a moment of the worker's clock, however much they are used until then."""

    selection: Selection
    at_s: float
    spared: frozenset[BlockHash] = frozenset()  # last blocks of its prefix of which something else was said later


_Heard = tuple[NamespaceId, BlockHash]  # the block that a node named, and its namespace


class DeviceExpiry:
    """One worker's pool and the clock. All methods belong to the worker's event loop."""

    def __init__(self, pool: BlockPool, worker: WorkerRecord, *, clock: Clock) -> None:
        self._pool = pool
        self._worker = worker
        self._clock = clock
        self._orders: dict[EvictSelector, _Order] = {}  # by what they name, each block once: a later order replaces it
        self._heard: dict[_Heard, float] = {}  # the moments that nodes told, those told longest ago first
        self._owner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look; call from the event loop."""
        assert self._owner is None
        self._owner = asyncio.create_task(self._keep_expiring(), name="expire device blocks")

    async def stop(self) -> None:
        """End the task. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        owner.cancel()
        await asyncio.wait([owner])
        if not owner.cancelled():
            owner.result()

    @property
    def running(self) -> bool:
        """Whether the task lives; without it blocks outlast their time."""
        return self._owner is not None and not self._owner.done()

    def order(self, selector: EvictSelector, *, ttl_s: float | None) -> ControlReport:
        """Have what `selector` names, and all that stands on it, go `ttl_s` seconds from now (at least TTL_S_MIN: the
        task sleeps as long); None takes an order on the same back. Either holds instead of what was said of the blocks
        named before, by whatever name (a prefix, or the hash of its last block), and of what nodes said of them.
        Refused, with nothing changed, when too many are kept."""
        selection = pool_selection(selector, self._worker.namespace)
        if selection is None:
            return self._report(ControlOutcome.NOT_HELD, num_blocks=0)
        num_blocks = len(self._pool.describe(selection))
        others = self._others_than(selection)
        if ttl_s is None:
            known = others != self._orders or num_blocks > 0
            self._orders = others
            self._drop_heard(selector, selection)
            return self._report(ControlOutcome.DONE if known else ControlOutcome.NOT_HELD, num_blocks=num_blocks)
        why = _why_refused(selector, others)
        if why:
            return self._report(ControlOutcome.REFUSED, num_blocks=num_blocks, why=why)
        self._drop_heard(selector, selection)
        self._orders = others | {selector: _Order(selection, self._clock.now_s() + ttl_s)}
        until_unix_ms = self._clock.unix_ms() + round(ttl_s * 1_000)
        outcome = ControlOutcome.DONE if num_blocks else ControlOutcome.NOT_HELD
        return self._report(outcome, num_blocks=num_blocks, until_unix_ms=until_unix_ms)

    def hear(self, namespace: NamespaceId, ends: Sequence[tuple[BlockHash, float]]) -> None:
        """A store node says of blocks that it hands out in how many seconds they go, by order. There is always room:
        what was said longest ago is forgotten for it, and said again with the next lease."""
        for block_hash, left_s in ends:
            self._heard.pop((namespace, block_hash), None)  # said again: it is the newest now
            of_namespace = [key for key in self._heard if key[0] == namespace]
            if len(of_namespace) >= DEVICE_ORDERS_PER_NAMESPACE_MAX:
                del self._heard[of_namespace[0]]
            elif len(self._heard) >= DEVICE_ORDERS_MAX:
                del self._heard[next(iter(self._heard))]
            self._heard[namespace, block_hash] = self._clock.now_s() + left_s

    def step(self) -> float:
        """Drop what is due; returns the seconds until there may be more."""
        now_s = self._clock.now_s()
        for selector in [selector for selector, order in self._orders.items() if order.at_s <= now_s]:
            order = self._orders.pop(selector)
            ends = self._held_ends(order.selection) - order.spared if order.spared else None
            self._pool.forget(order.selection if ends is None else Selection(roots=ends))
        for key in [key for key, at_s in self._heard.items() if at_s <= now_s]:
            del self._heard[key]
            self._pool.forget(self._selection_of(key))
        next_s = self._pool.evict_expired()
        moments = (*(order.at_s for order in self._orders.values()), *self._heard.values())
        next_order_s = min(moments, default=math.inf) - now_s
        # Nothing that is used from now on is over before TTL_S_MIN.
        return min(max(min(next_s, next_order_s), DEVICE_EXPIRY_SCAN_MS / 1_000), TTL_S_MIN)

    async def _keep_expiring(self) -> None:
        while True:
            wait_s = self.step()
            await asyncio.sleep(wait_s)

    def _others_than(self, named: Selection) -> dict[EvictSelector, _Order]:
        """The orders, less what they say of the very blocks that a selection names."""
        if not self._orders:
            return {}
        # Hashed once for all orders: the event loop waits for it.
        blocks = self._ends(named) if named.roots is None else named.roots
        left = ((selector, self._less(order, named, blocks)) for selector, order in self._orders.items())
        return {selector: order for selector, order in left if order is not None}

    def _less(self, order: _Order, named: Selection, blocks: frozenset[BlockHash]) -> _Order | None:
        """One of them; None where nothing is left of it. blocks: the very ones that are named."""
        theirs = order.selection
        if theirs.roots is not None:
            roots = theirs.roots - blocks
            return replace(order, selection=replace(theirs, roots=roots)) if roots else None
        if named.roots is None:
            if self._full_blocks(named) != self._full_blocks(theirs):
                return order
            if named.namespace in (None, theirs.namespace):
                return None
        spared = blocks if named.roots is None else blocks & self._ends(theirs)
        return replace(order, spared=order.spared | spared)

    def _ends(self, prefix: Selection) -> frozenset[BlockHash]:
        """What the last full block of a prefix is called: in the namespace that it names, and in those narrowed from it
        of which the pool holds one."""
        namespace, layout = self._worker.namespace, self._worker.namespace.layout
        prompt = hash_prompt(
            prefix.namespace or namespace.id,
            self._full_blocks(prefix),
            block_tokens=layout.block_tokens,
            algorithm=namespace.hash_algorithm,
        )
        return self._held_ends(prefix) | frozenset(prompt.chain[-1:])

    def _held_ends(self, prefix: Selection) -> frozenset[BlockHash]:
        """The last full blocks of a prefix that the pool holds."""
        last = len(prefix.prefix_token_ids) // self._worker.namespace.layout.block_tokens - 1
        return frozenset(block.block_hash for block in self._pool.describe(prefix) if block.position == last)

    def _full_blocks(self, prefix: Selection) -> tuple[int, ...]:
        """The tokens that count of a prefix."""
        num_tokens, block_tokens = len(prefix.prefix_token_ids), self._worker.namespace.layout.block_tokens
        return prefix.prefix_token_ids[: num_tokens - num_tokens % block_tokens]

    def _selection_of(self, *keys: _Heard) -> Selection:
        return Selection(roots=frozenset(block_hash for _, block_hash in keys))

    def _drop_heard(self, selector: EvictSelector, selection: Selection) -> None:
        """Forget what nodes said of the very blocks that the selector names. What was said of other blocks stands: a
        pool that holds them takes no lease that would say it again."""
        named = self._heard_in(selection.namespace)
        if selector.block_hashes:
            named = [key for key in named if key[1] in selector.block_hashes]
        else:
            named = self._ends_of(selector.prefix_token_ids, named)
        for key in named:
            del self._heard[key]

    def _heard_in(self, namespace: NamespaceId | None) -> list[_Heard]:
        """Heard orders on blocks of a namespace or of those narrowed from it; None for all. Which one was narrowed from
        which only a block tells: what the pool does not hold counts, since its next lease says the order again."""
        if namespace is None or not self._heard:
            return list(self._heard)
        held = self._pool.describe(self._selection_of(*self._heard))
        outside = {block.block_hash for block in held if namespace not in (block.namespace, *block.narrowed_from)}
        return [key for key in self._heard if key[1] not in outside]

    def _ends_of(self, token_ids: tuple[int, ...], heard: Sequence[_Heard]) -> list[_Heard]:
        """Which of the heard orders are on a prefix's last full block. Those of a namespace that there is no time to
        hash it in count too: DEVICE_ORDER_TOKENS_MAX tokens hold the loop up for 0.1 s."""
        namespaces = list(dict.fromkeys(namespace for namespace, _ in heard))
        layout, algorithm = self._worker.namespace.layout, self._worker.namespace.hash_algorithm
        last: dict[NamespaceId, Chain] = {}  # one block, or none where the prefix has no full one
        for namespace in namespaces[: DEVICE_ORDER_TOKENS_MAX // max(1, len(token_ids))]:
            prompt = hash_prompt(namespace, token_ids, block_tokens=layout.block_tokens, algorithm=algorithm)
            last[namespace] = prompt.chain[-1:]
        return [key for key in heard if key[0] not in last or last[key[0]] == (key[1],)]

    def _report(
        self, outcome: ControlOutcome, *, num_blocks: int, why: str = "", until_unix_ms: int = 0
    ) -> ControlReport:
        layout = self._worker.namespace.layout.in_pool
        return ControlReport(
            holder=self._worker.holder_id,
            outcome=outcome,
            blocks=num_blocks,
            tokens=num_blocks * layout.block_tokens,
            bytes=num_blocks * layout.block_bytes,
            until_unix_ms=until_unix_ms,
            why=why,
        )


def _why_refused(selector: EvictSelector, orders: Mapping[EvictSelector, _Order]) -> str:
    """Why one more order is too many beside these; "" when it is not. One on the same selector makes room for it."""
    others = [other for other in orders if other != selector]
    of_namespace = sum(other.namespace == selector.namespace for other in others)
    num_tokens = sum(len(other.prefix_token_ids) for other in others) + len(selector.prefix_token_ids)
    if len(others) >= DEVICE_ORDERS_MAX or of_namespace >= DEVICE_ORDERS_PER_NAMESPACE_MAX:
        return f"it keeps {len(others)} orders, {of_namespace} of this namespace; take one back or wait for it"
    if num_tokens > DEVICE_ORDER_TOKENS_MAX:
        return f"the prefixes of its orders would have {num_tokens} tokens; at most {DEVICE_ORDER_TOKENS_MAX}"
    return ""
