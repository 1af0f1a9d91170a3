"""The tenants file as it changes while a gateway runs: what is in force, and when it is read again.

A change counts when the file has looked the same for two rounds, so that a file which is just being written is not read
half. One that is broken is logged, and the one before stays in force: nobody is locked out by a slip of the pen.
"""

import asyncio
import logging
import os
from pathlib import Path

from headrace.core.errors import ConfigInvalid
from headrace.core.tenants import KeyRing
from headrace.gateway.read_tenants import read_tenants

log = logging.getLogger(__name__)

_Look = tuple[int, int, int] | None  # time of the last change, size, file number; None: no file


class TenantsFile:
    """One file. Raises ConfigInvalid when it is broken from the start."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._read = self._seen = self._look()
        self.key_ring: KeyRing = read_tenants(path)

    async def reread(self) -> None:
        """Take the key ring from the file anew, once that has changed and rests. One look at the file per call."""
        look, before = self._look(), self._seen
        self._seen = look
        if look == self._read or look != before:
            return
        self._read = look
        try:
            # YAML of a thousand keys takes a second to parse: not on the loop that serves.
            self.key_ring = await asyncio.to_thread(read_tenants, self._path)
        except ConfigInvalid as broken:
            log.error("the tenants file has changed and is not read; the one before stays in force: %s", broken)
            return
        keys, tenants = len(self.key_ring.keys), len(self.key_ring.tenants)
        log.info("the tenants file has changed: %d keys of %d tenants", keys, tenants)

    def _look(self) -> _Look:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)
