"""KV events of one store node, from its changes to its sockets: what the service starts and stops.

Owns the order: the log follows the node from before its first change, `begin` binds and numbers, `run` sends, `close`
ends. ZeroMQ is loaded only here, so a node without events needs none of it.
"""

import logging
from typing import TYPE_CHECKING

from headrace.config import StoreSettings
from headrace.core.clock import Clock
from headrace.core.errors import ConfigInvalid
from headrace.store.kv_event_format import EventFormat, EventHashes, EventLayout
from headrace.store.kv_event_log import KvEventLog

if TYPE_CHECKING:
    from headrace.store.publish_kv_events import KvEventSockets

_log = logging.getLogger(__name__)


class KvEvents:
    """The log and, after `begin`, the sockets. One event loop."""

    def __init__(self, settings: StoreSettings, *, node_id: str, clock: Clock) -> None:
        self._settings = settings
        self._node_id = node_id
        self._clock = clock
        self._sockets: KvEventSockets | None = None
        self.log = KvEventLog(
            EventFormat(EventLayout(settings.kv_events_layout), EventHashes(settings.kv_events_hashes)), clock=clock
        )

    def begin(self, incarnation: int) -> None:
        """Open the sockets and begin to number. Raises ConfigInvalid: an endpoint cannot be used, or no pyzmq."""
        try:
            from headrace.store.publish_kv_events import KvEventSockets
        except ModuleNotFoundError as error:
            raise ConfigInvalid("kv_events_endpoint", f"needs `pip install 'headrace[events]'` ({error})") from error
        self._sockets = KvEventSockets(self._settings, node_id=self._node_id)
        self.log.begin(incarnation)
        _log.info("KV events on %s, replays on %s", self.endpoint, self.replay_endpoint or "no socket")

    @property
    def endpoint(self) -> str:
        """Where live events come from; after `begin`."""
        assert self._sockets is not None
        return self._sockets.endpoint

    @property
    def replay_endpoint(self) -> str:
        """Where replays are asked for; empty without them; after `begin`."""
        assert self._sockets is not None
        return self._sockets.replay_endpoint

    async def run(self) -> None:
        """Send and answer until cancelled; after `begin`."""
        from headrace.store.publish_kv_events import publish_kv_events

        assert self._sockets is not None
        await publish_kv_events(self.log, self._sockets, clock=self._clock)

    def close(self) -> None:
        """Close the sockets, if they were opened. Idempotent."""
        if self._sockets is not None:
            self._sockets.close()
