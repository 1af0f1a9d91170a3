"""A process that dies before the n-th line that writes durable state: every crash point there is, without a seam.

What outlives a store node is written in a few files only (the arena's memory, the disk tier's segments). While `Death`
is armed, each line executed in one of those files is counted, and before the n-th a `ProcessDied` is raised. It is no
Exception, so no handler of the code under test mistakes it for a fault that it can act on. The caller throws the dead
process's objects away and opens its memory and files anew.
"""

import sys
from collections.abc import Sequence
from types import FrameType, ModuleType, TracebackType
from typing import Any


class ProcessDied(BaseException):
    """The process is gone: nothing after this line ran."""


class Death:
    """A scope in which the process dies before line `lines_left` of the given modules, or else at the scope's end."""

    def __init__(self, lines_left: int, modules: Sequence[ModuleType]) -> None:
        self._lines_left = lines_left
        self._files = frozenset(module.__file__ for module in modules)
        self._tracer_before: Any = None

    def __enter__(self) -> None:
        self._tracer_before = sys.gettrace()
        sys.settrace(self._on_call)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._tracer_before)
        if kind is None or (issubclass(kind, Exception) and not issubclass(kind, AssertionError)):
            raise ProcessDied from None  # what the call returned or raised, nobody lived to see

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if frame.f_code.co_filename in self._files else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._lines_left -= 1
            if self._lines_left <= 0:
                raise ProcessDied
        return self._on_line
