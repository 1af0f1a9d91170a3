"""A store node's process that is killed when it stands still for as long as its last argument says, in ms.

Run as a script by `test_stalled_node.py`, with the settings of a real node before that.
"""

import asyncio
import sys

from headrace.config import load_config
from headrace.core.clock import SystemClock
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.service import StoreNodeService, serve_store_node
from headrace.telemetry.logs import set_up_logs


async def main(node_id: str, arena_dir: str, stall_ms: str) -> None:
    set_up_logs("json", part="store node", instance_id=node_id)
    clock = SystemClock()
    membership = MemoryMembership(clock)
    settings = load_config({"node_id": node_id, "arena_dir": arena_dir, "arena_mb": "1"}, environ={}).store
    service = StoreNodeService(settings, index=MemoryIndex(membership), membership=membership, clock=clock)
    await serve_store_node(service, stop=asyncio.Event(), log_format="json", stall_ms=int(stall_ms))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
