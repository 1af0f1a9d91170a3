"""From the gateway's plan to a Serve replica: a call goes to the worker that it names.

Owns the one use of Serve's RequestRouter, an interface that Ray calls alpha. It decides nothing: the gateway has.

When the named worker is gone, the call goes to any replica that is there. That replica sees that the call is not its
own and refuses it (`serve_app.py`), which the gateway hears within one round trip. To answer with no replica at all
would make Serve ask again, with growing pauses and without end.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PlanRequestRouter(RequestRouter):
    """Sends a call to the replica whose unique id is the call's `worker_id`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One group of replicas to try: the named one alone, or all of them when it is gone."""
        if pending_request is None:
            return [candidate_replicas]
        worker_id = pending_request.args[0].worker_id
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == worker_id]
        return [named or candidate_replicas]
