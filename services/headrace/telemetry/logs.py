"""How every process of ours logs: one set-up, one line a record, and which part and which request a line is about.

    2026-11-30T10:12:59.123Z WARNING headrace.gateway.route_request [gateway g1] [request 5f3a] the message
    {"time": "2026-11-30T10:12:59.123Z", "level": "WARNING", "logger": ..., "message": ..., "part": ..., "id": ...,
     "request_id": ..., "trace_id": ...}

The request comes from `request_context.py`, so nobody passes it along. Prompts, answers and keys are never logged: who
logs is careful, and this file adds nothing of a request but its ids. Line breaks in a message are written as \\n, so
that text from outside cannot pretend to be another record; a traceback follows on lines of its own (json: in `error`).
"""

import json
import logging
import sys
import time
from typing import TextIO

from headrace.telemetry.request_context import current

# Our own loggers tell from INFO on; what libraries say is wanted from WARNING on.
OURS = ("headrace", "headrace_cluster")


def set_up_logs(log_format: str, *, part: str, instance_id: str = "", stream: TextIO | None = None) -> None:
    """Have this process log to `stream` (standard error) as `text` or `json`; a later call replaces an earlier one.

    part: gateway, worker, store node or supervisor; instance_id: which of them.
    """
    handler = _PartHandler(stream or sys.stderr)
    formatter = JsonLines if log_format == "json" else TextLines
    handler.setFormatter(formatter(part=part, instance_id=instance_id))
    root = logging.getLogger()
    for earlier in [known for known in root.handlers if isinstance(known, _PartHandler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)


class _PartHandler(logging.StreamHandler[TextIO]):
    """What set_up_logs has made, and may replace."""


class _Lines(logging.Formatter):
    """What both formats know."""

    def __init__(self, *, part: str, instance_id: str) -> None:
        super().__init__()
        self._part = part
        self._instance_id = instance_id

    def _time(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"

    def _error(self, record: logging.LogRecord) -> str:
        text = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        return text or record.exc_text or ""


class TextLines(_Lines):
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback where there is one."""
        context = current()
        about = f"[{self._part} {self._instance_id}]" if self._instance_id else f"[{self._part}]"
        if context.request_id:
            about += f" [request {one_line(context.request_id)}]"
        line = f"{self._time(record)} {record.levelname} {record.name} {about} {one_line(record.getMessage())}"
        error = self._error(record)
        return f"{line}\n{error}" if error else line


class JsonLines(_Lines):
    """For programs."""

    def format(self, record: logging.LogRecord) -> str:
        """One object on one line."""
        context = current()
        entry = {
            "time": self._time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "part": self._part,
            "id": self._instance_id,
            "request_id": context.request_id,
        }
        if context.traceparent.count("-") == 3:
            entry["trace_id"] = context.traceparent.split("-")[1]
        error = self._error(record)
        if error:
            entry["error"] = error
        return json.dumps(entry, ensure_ascii=False)


def one_line(text: str) -> str:
    """The text with its line breaks and other control characters spelled out."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
