"""The tenants file as the gateways of a local system read it: the operator's, and a key for the supervisor itself.

The supervisor waits for its parts through the same front door as everybody else.

The copy is written anew when the operator's file changes, and exists as long as the instance does. It holds hashed keys
only; the supervisor's own key stays in its memory. Whether the file is right is the gateways' to say.
"""

import os
from pathlib import Path
from typing import Any

import yaml

from headrace.core.tenants import HashedKey, TenantRole, new_key


class TenantsCopy:
    """`path` is for the gateways' settings, `key` is what the supervisor calls with."""

    def __init__(self, tenants_file: str, *, directory: Path, instance_id: str) -> None:
        """Write the copy into `directory` (private to this user). tenants_file: one that `read_tenants` accepts."""
        self.key = new_key()
        self.path = str(directory / "tenants.yaml")
        self._original = Path(tenants_file)
        self._supervisor = {
            "name": f"supervisor-{instance_id}",
            "role": TenantRole.ADMIN.value,
            "keys": [HashedKey.of(self.key).spell()],
        }
        self._seen = _version(self._original)
        self._write(_read(self._original))

    def follow(self) -> str:
        """Copy the file again if it has changed. What is wrong with it, once for each change; "" when nothing is.

        A file that cannot be read leaves the copy as it is, and with it the tenants that are let in.
        """
        seen = _version(self._original)
        if seen == self._seen:
            return ""
        self._seen = seen
        try:
            self._write(_read(self._original))
        except (OSError, ValueError, RecursionError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            # The kind alone: a parser's message would quote the line, and so a key.
            return f"{self._original} is not a tenants file ({type(error).__name__}); the one before stays in force"
        return ""

    def _write(self, tenants: dict[str, Any]) -> None:
        """Whole or not at all: gateways look at it every second."""
        tenants["tenants"].append(self._supervisor)
        fresh = Path(f"{self.path}.new")
        fresh.touch(mode=0o600)
        fresh.write_text(yaml.safe_dump(tenants), encoding="utf-8")
        os.replace(fresh, self.path)


def _read(original: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(original.read_text(encoding="utf-8"))
    return loaded


def _version(original: Path) -> tuple[int, int, int] | None:
    """Changes when the file does; None while there is none."""
    try:
        found = original.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)
