"""A node's table of budgets as a file beside its arena, so that an operator's word outlives the process.

JSON with a version, written whole to a second file, synced, and renamed over the first: a reader sees the old table or
the new one. A file that cannot be read costs the table and never the start: gateways carry it here again from other
nodes and from their tenants file.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.blocks.host_arena import budgets_path
from headrace.core.block import NamespaceId
from headrace.core.budgets import Budget
from headrace.core.limits import GRPC_MESSAGE_BYTES_MAX

BUDGETS_VERSION = 1

_log = logging.getLogger(__name__)


class BudgetsFile:
    """The file of one arena. One process writes it: the one that holds the arena's lock."""

    def __init__(self, arena: Path) -> None:
        self._path = budgets_path(arena)

    def read(self) -> tuple[Budget, ...]:
        """The table that was written last; empty when there is none. What cannot be read is logged and left out."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            _log.warning("the budgets in %s are not in force: %s", self._path, error.strerror)
            return ()
        try:
            if len(text) > GRPC_MESSAGE_BYTES_MAX:
                raise ValueError("it is too large")
            loaded = json.loads(text)
            if not isinstance(loaded, dict) or loaded.get("version") != BUDGETS_VERSION:
                raise ValueError("it is not of a version that this build knows")
            return tuple(_parse(row) for row in loaded["budgets"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("the budgets in %s are not in force: the file is broken (%s)", self._path, error)
            return ()

    def write(self, budgets: Sequence[Budget]) -> None:
        """Have this table found at the next start. A file that cannot be written is logged: the table is in force."""
        scratch = self._path.with_name(f"{self._path.name}.new")
        text = json.dumps({"version": BUDGETS_VERSION, "budgets": [asdict(budget) for budget in budgets]})
        try:
            with scratch.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            _log.warning("the budgets would not outlive this process: %s: %s", self._path, error.strerror)

    def remove(self) -> None:
        """Forget the table with the arena that it belongs to."""
        self._path.unlink(missing_ok=True)


def _parse(row: Any) -> Budget:
    """One row. Raises ValueError, KeyError or TypeError for anything that `write` would not have written."""
    account, set_by, namespaces = row["account"], row["set_by"], row["namespaces"]
    bytes_max, bytes_min, set_unix_ms = row["bytes_max"], row["bytes_min"], row["set_unix_ms"]
    if not all(isinstance(each, str) for each in (account, set_by, *namespaces)):
        raise ValueError("a name is not text")
    numbers = [bytes_min, set_unix_ms] if bytes_max is None else [bytes_min, set_unix_ms, bytes_max]
    if not all(type(each) is int and each >= 0 for each in numbers) or max(numbers[2:], default=bytes_min) < bytes_min:
        raise ValueError("a bound is not one")
    return Budget(
        account=account,
        namespaces=tuple(sorted(NamespaceId(each) for each in namespaces)),
        bytes_max=bytes_max,
        bytes_min=bytes_min,
        set_unix_ms=set_unix_ms,
        set_by=set_by,
    )
