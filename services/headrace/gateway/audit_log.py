"""One line for each admin call that changed something, or read what others sent: who, what, with what effect. Logger
`headrace.audit`.

Calls that were refused for their key leave lines too, a second's worth in one: whoever tries keys must be seen, and
must not fill the disk.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.core.clock import Clock
from headrace.core.errors import PermissionDenied, Unauthenticated
from headrace.core.front_door_limits import AUDIT_CHARS_MAX, AUDIT_PEERS_MAX, AUDIT_REFUSALS_MS, AUDIT_VALUES_MAX
from headrace.wire.v1 import admin_pb2

log = logging.getLogger("headrace.audit")


def audit(who: str, what: str, asked: Mapping[str, object], effect: Mapping[str, object]) -> None:
    """Leave the line, as one JSON object; bytes in hex. Prompts are named by their length, never by their text, and of
    what callers name as long as they like there is the beginning."""
    bounded = {name: _beginning(value) for name, value in asked.items()}
    line = {"who": who, "what": what, "asked": bounded, "effect": effect}
    log.info("%s", json.dumps(line, default=lambda value: value.hex() if isinstance(value, bytes) else str(value)))


def _beginning(value: object) -> object:
    if isinstance(value, str | bytes):
        return value[:AUDIT_CHARS_MAX]
    if isinstance(value, Sequence):
        more = len(value) - AUDIT_VALUES_MAX
        return [*map(_beginning, value[:AUDIT_VALUES_MAX]), *([f"and {more} more"] if more > 0 else [])]
    return value


def asked_of(selector: admin_pb2.Selector) -> dict[str, object]:
    """What a selector asks for, as the line has it: without the prefix itself."""
    asked = {field.name: value for field, value in selector.ListFields() if not field.name.startswith("prefix")}
    return {**asked, "prefix_length": len(selector.prefix_text) or len(selector.prefix_token_ids)}


class RefusalLog:
    """Calls that were refused for want of a key, or of a right, as they are told: how many, why and from where."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._whys: Counter[str] = Counter()
        self._peers: set[str] = set()
        self._told_s = float("-inf")

    def saw(self, error: Exception, *, peer: str) -> None:
        """Count one refused call, and leave a line unless there was one just now; then `flush` does."""
        if not isinstance(error, Unauthenticated | PermissionDenied):
            return
        self._whys["no or unknown key" if isinstance(error, Unauthenticated) else f"may not {error.what}"] += 1
        if len(self._peers) < AUDIT_PEERS_MAX:
            self._peers.add(peer)
        self.flush()

    def flush(self) -> None:
        """Leave the line that is due, if one is."""
        now_s = self._clock.now_s()
        if self._whys and now_s - self._told_s >= AUDIT_REFUSALS_MS / 1000:
            self._told_s = now_s
            audit("unknown", "refused", {"peers": sorted(self._peers)}, dict(self._whys))
            self._whys.clear()
            self._peers.clear()
