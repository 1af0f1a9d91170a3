"""Ports for servers that must be told theirs: free when they are named, and still so when they are bound, also again.

The kernel takes none below 32,768 for a caller that asks for any, nor for an outgoing connection, and Ray's workers go
up to 19,999: nothing comes between. Each of xdist's workers has a part of them that no other one names ports of. Other
processes begin at different places, and none names a port twice in a round.
"""

import os
import random
import socket
from contextlib import ExitStack


def part_of(ports: range, *, worker: str, of: int) -> range:
    """What is xdist's worker `gw1`'s of so many workers; one that replaces a dead one has an earlier one's."""
    size = len(ports) // of
    return ports[int(worker.removeprefix("gw")) % of * size :][:size]


PORTS = part_of(
    range(20_000, 29_000),
    worker=os.environ.get("PYTEST_XDIST_WORKER", "gw0"),
    of=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)
_named = random.Random(os.getpid()).randrange(len(PORTS))


def free_ports(count: int) -> range:
    """So many in a row."""
    global _named
    for _ in range(len(PORTS) // count):
        first = _named % len(PORTS)
        _named += count
        ports = PORTS[first : first + count]
        if len(ports) == count and _are_free(ports):
            return ports
    raise AssertionError(f"no {count} free ports in a row")


def _are_free(ports: range) -> bool:
    with ExitStack() as held:
        try:
            for port in ports:
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
