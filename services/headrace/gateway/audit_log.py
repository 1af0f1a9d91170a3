"""One line for each admin call that changed something: who, what, with what effect. Logger `headrace.audit`."""

import json
import logging
from collections.abc import Mapping

log = logging.getLogger("headrace.audit")


def audit(who: str, what: str, asked: Mapping[str, object], effect: Mapping[str, object]) -> None:
    """Leave the line, as one JSON object; bytes in hex. Prompts are named by their length, never by their text."""
    line = {"who": who, "what": what, "asked": asked, "effect": effect}
    log.info("%s", json.dumps(line, default=lambda value: value.hex() if isinstance(value, bytes) else str(value)))
