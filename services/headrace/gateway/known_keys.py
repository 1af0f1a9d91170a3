"""Whose API keys a gateway lets in. `tenants_file.py` has the ones that come from a file and change with it."""

from dataclasses import dataclass
from typing import Protocol

from headrace.core.tenants import KeyRing


class KnownKeys(Protocol):
    """The keys that are in force now."""

    @property
    def key_ring(self) -> KeyRing | None:
        """Every key and its tenant; None lets everybody in, as one tenant."""
        ...

    async def reread(self) -> None:
        """Look whether others are in force. Called every second, and never raises for what it finds."""
        ...


@dataclass(frozen=True, slots=True)
class FixedKeys:
    """Keys that stay as they are."""

    key_ring: KeyRing | None = None

    async def reread(self) -> None:
        """There is nothing to read."""


NO_KEYS = FixedKeys()
