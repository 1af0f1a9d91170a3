"""One line for each change that an admin call began, or that read what others sent: who, what, how it ended, with what
effect. Logger `headrace.audit`.

Calls that were refused for their key or their role began nothing. They leave lines too, a second's worth in one:
whoever tries keys must be seen, and must not fill the disk.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest, Overloaded, PermissionDenied, Unauthenticated
from headrace.core.front_door_limits import AUDIT_CHARS_MAX, AUDIT_PEERS_MAX, AUDIT_REFUSALS_MS, AUDIT_VALUES_MAX
from headrace.core.generation import ControlOutcome
from headrace.wire.status import message_of
from headrace.wire.v1 import admin_pb2

log = logging.getLogger("headrace.audit")


class ChangeEnd(StrEnum):
    """How a change ended."""

    DONE = "done"  # at one holder at least; the effect says what each of them did
    REFUSED = "refused"  # nothing has changed: it may not be, cannot be as it was asked for, or nobody holds it
    FAILED = "failed"  # part of it may be done: the effect says what is known
    ABANDONED = "abandoned"  # nobody waited for its end, or the gateway stopped; as FAILED


@dataclass(slots=True)
class AuditedChange:
    """What is written down of a change under way. `ended`, where it is set, is more than the scope's end tells."""

    asked: dict[str, object]
    effect: dict[str, object] = field(default_factory=dict)
    ended: ChangeEnd | None = None


@contextmanager
def audited_change(who: str, what: str, asked: Mapping[str, object]) -> Iterator[AuditedChange]:
    """The scope of one change, from when its caller is known to have the right: leaves exactly one line, however the
    scope ends, with why if it ended by an error."""
    change = AuditedChange(dict(asked))
    ended, why = ChangeEnd.ABANDONED, ""
    try:
        yield change
        ended = ChangeEnd.DONE
    except (InvalidRequest, PermissionDenied, Overloaded) as error:
        ended, why = ChangeEnd.REFUSED, message_of(error)
        raise
    except Exception as error:
        ended, why = ChangeEnd.FAILED, message_of(error)
        raise
    finally:
        audit(who, what, change.asked, change.effect, ended=change.ended or ended, why=why)


def ended_at(outcomes: Sequence[str], *, errors: int) -> ChangeEnd:
    """How a change ended that was given to several holders: the outcomes (`ControlOutcome`) of those that answered, and
    how many did not.

    Done if one of them did it. Else failed if one did not answer, since that one may have done it; else refused.
    """
    if ControlOutcome.DONE in outcomes:
        return ChangeEnd.DONE
    return ChangeEnd.FAILED if errors else ChangeEnd.REFUSED


def audit(
    who: str,
    what: str,
    asked: Mapping[str, object],
    effect: Mapping[str, object],
    *,
    ended: ChangeEnd = ChangeEnd.DONE,
    why: str = "",
) -> None:
    """Leave the line, as one JSON object; bytes in hex. Prompts are named by their length, never by their text, and of
    what callers name as long as they like there is the beginning."""
    bounded = {name: _beginning(value) for name, value in asked.items()}
    line: dict[str, object] = {"who": who, "what": what, "asked": bounded, "ended": ended, "effect": effect}
    if why:
        line["why"] = _beginning(why)
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
            peers = {"peers": sorted(self._peers)}
            audit("unknown", "refused", peers, dict(self._whys), ended=ChangeEnd.REFUSED)
            self._whys.clear()
            self._peers.clear()
