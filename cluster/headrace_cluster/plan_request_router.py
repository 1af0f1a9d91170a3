"""From the gateway's plan to a Serve replica: a call goes to the worker that it names.

Owns the one use of Serve's RequestRouter, an interface that Ray calls alpha. It decides nothing: the gateway has.

A worker may be named that is not among the replicas:

- It is gone. The call goes to any replica that is there, which sees that the call is not its own and refuses it
  (`worker_replica.py`); the gateway hears so within a round trip. To answer with no replica at all would make Serve ask
  again, with growing pauses and without end.
- It is new: it announces itself at the end of its constructor, a moment before Serve tells its handles of it. A worker
  that this router has never seen is therefore waited for, for a bounded time.
"""

import asyncio
from collections import deque
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# Serve's controller looks at starting replicas every 0.1 s and its handles hear of them in one more round trip.
NEW_WORKER_WAIT_S = 2.0
# Replicas remembered as seen; one that fell out of this is waited for once more, which costs time and nothing else.
SEEN_MAX = 4_096


class PlanRequestRouter(RequestRouter):
    """Sends a call to the replica whose unique id is the call's `worker_id`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: deque[str] = deque(maxlen=SEEN_MAX)
        self._news = asyncio.Event()  # set, and replaced by a new one, at every change

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve tells of every change here."""
        self._seen.extend({r.replica_id.unique_id for r in replicas} - set(self._seen))
        super().update_replicas(replicas)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One group of replicas to try: the named one alone, or all of them when it is gone."""
        if pending_request is None:
            return [candidate_replicas]
        worker_id = pending_request.args[0].worker_id
        try:
            async with asyncio.timeout(NEW_WORKER_WAIT_S):
                while worker_id not in self._seen:
                    await self._news.wait()
        except TimeoutError:
            pass
        here = list(self.curr_replicas.values())
        return [[replica for replica in here if replica.replica_id.unique_id == worker_id] or here]
