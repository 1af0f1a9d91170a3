"""One line for each admin call that changed something: who, what, with what effect. Logger `headrace.audit`."""

import json
import logging
from collections.abc import Mapping

from headrace.wire.v1 import admin_pb2

log = logging.getLogger("headrace.audit")


def audit(who: str, what: str, asked: Mapping[str, object], effect: Mapping[str, object]) -> None:
    """Leave the line, as one JSON object; bytes in hex. Prompts are named by their length, never by their text."""
    line = {"who": who, "what": what, "asked": asked, "effect": effect}
    log.info("%s", json.dumps(line, default=lambda value: value.hex() if isinstance(value, bytes) else str(value)))


def asked_of(selector: admin_pb2.Selector) -> dict[str, object]:
    """What a selector asks for, as the line has it: without the prefix itself."""
    asked = {field.name: value for field, value in selector.ListFields() if not field.name.startswith("prefix")}
    return {**asked, "prefix_length": len(selector.prefix_text) or len(selector.prefix_token_ids)}
