"""The other gateways of a system: how this one is found by them, and how it asks them what only they remember.

Each gateway announces itself among the members and serves `GatewayPeer` on a port of its own. What a gateway remembers
of its last requests stays in its memory: prompts are their callers' business and do not go to Redis, and what is asked
for now and then is not worth a write with every request. So the memory of a gateway that died is gone with it.
"""

import asyncio
import os
from contextlib import suppress
from typing import Any

import grpc

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable, InvalidRequest
from headrace.core.limits import ADMIN_CALL_TIMEOUT_MS, MEMBER_TTL_MS
from headrace.core.members import GatewayRecord
from headrace.core.ports import Membership
from headrace.gateway.authenticate import AUTHORIZATION
from headrace.transfer.channels import Channels, bind_server, build_server
from headrace.transfer.tls_files import Tls
from headrace.wire.status import error_of_call
from headrace.wire.v1 import admin_pb2_grpc

STOP_GRACE_S = 1.0  # for answers under way: an answer takes milliseconds


class PeerGateways:
    """This gateway among the others. `start` it on the loop that serves, `stop` it there."""

    def __init__(
        self,
        membership: Membership,
        *,
        gateway_id: str,
        host: str,
        host_id: str,
        clock: Clock,
        metrics_port: int = 0,
        tls: Tls | None = None,
    ) -> None:
        """host: the address to serve on, where others reach it. host_id: as in a worker's record."""
        self._metrics_port = metrics_port
        self._tls = tls
        self._membership = membership
        self._gateway_id = gateway_id
        self._host = host
        self._host_id = host_id
        self._clock = clock
        self._server: grpc.aio.Server | None = None
        self._record: GatewayRecord | None = None
        self._seen: tuple[GatewayRecord, ...] = ()  # when the members were last read

    async def start(self, remembering: Any) -> None:
        """Serve what others may ask. remembering: has the methods of `GatewayPeer`, and asks nobody itself."""
        self._server = build_server()
        register: Any = admin_pb2_grpc.add_GatewayPeerServicer_to_server  # generated code is untyped
        register(remembering, self._server)
        port = bind_server(self._server, f"{self._host}:0", tls=self._tls)
        await self._server.start()
        self._record = GatewayRecord(
            gateway_id=self._gateway_id,
            incarnation=self._clock.unix_ms(),
            host=self._host_id,
            address=f"{self._host}:{port}",
            pid=os.getpid(),
            metrics_port=self._metrics_port,
        )

    async def step(self) -> None:
        """Announce this gateway, if it has started, and see who else is there. Both wait for the next step while the
        membership is away."""
        if self._record is not None:
            with suppress(IndexUnavailable):
                await self._membership.announce(self._record, ttl_ms=MEMBER_TTL_MS)
                self._seen = await self._membership.gateways()

    async def stop(self) -> None:
        """Be unseen, then serve no more. Idempotent."""
        record, self._record = self._record, None
        if record is not None:
            with suppress(IndexUnavailable):  # then the record runs out by itself
                await self._membership.withdraw(record)
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_GRACE_S)

    async def ask(self, rpc: str, request: Any, *, authorization: str | None, unknown: InvalidRequest) -> Any:
        """What the first other gateway answers that remembers the request, as it would answer this very caller.

        rpc: of `GatewayPeer`. unknown: what this gateway itself said. Raises InvalidRequest when no other knows more,
        which says who could not be asked.
        """
        with suppress(IndexUnavailable):  # then those are asked who were there lately
            self._seen = await self._membership.gateways()
        others = [each for each in self._seen if each.gateway_id != self._gateway_id]
        silent = []
        metadata = ((AUTHORIZATION, authorization),) if authorization else ()
        channels = Channels(self._tls)  # of this question: gateways come and go, and questions are rare
        asking = [
            asyncio.create_task(_ask_one(each, rpc, request, metadata=metadata, channels=channels)) for each in others
        ]
        try:
            for answering in asyncio.as_completed(asking):
                answer = await answering
                if isinstance(answer, str):
                    silent.append(answer)
                elif answer is not None:
                    return answer
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await channels.close()
        nor = f", nor among those of {len(others)} other gateways" if others else ""
        missing = f" ({'; '.join(sorted(silent))})" if silent else ""
        raise InvalidRequest(f"{unknown}{nor}{missing}", param=unknown.param) from None


async def _ask_one(
    gateway: GatewayRecord, rpc: str, request: Any, *, metadata: tuple[tuple[str, str], ...], channels: Channels
) -> Any:
    """Its answer; None when it does not remember the request; a text when it could not be asked."""
    stub_of: Any = admin_pb2_grpc.GatewayPeerStub
    method = getattr(stub_of(channels.to(gateway.address)), rpc)
    try:
        return await method(request, timeout=ADMIN_CALL_TIMEOUT_MS / 1000, metadata=metadata)
    except grpc.aio.AioRpcError as failed:
        if isinstance(error_of_call(failed), InvalidRequest):
            return None
        return f"gateway {gateway.gateway_id} does not answer: {failed.code().name}"
