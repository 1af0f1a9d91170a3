"""How a failed gRPC call is told to its caller, under either kind of server. The mapping is `wire/status.py`'s."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from headrace.core.errors import HeadraceError
from headrace.wire.status import message_of, status_of, trailing_metadata

log = logging.getLogger(__name__)

# Tells the caller of `context` about an error, and always raises.
RefuseCall = Callable[[Any, Exception], Awaitable[NoReturn]]


def telling(refuse: RefuseCall, tell: Callable[[Exception, str], None]) -> RefuseCall:
    """The same way to refuse a call, of which `tell` hears first: the error, and where the call came from."""

    async def tell_and_refuse(context: Any, error: Exception) -> NoReturn:
        tell(error, context.peer())
        await refuse(context, error)

    return tell_and_refuse


async def refuse_call(context: Any, error: Exception) -> NoReturn:
    """End a call of a grpc.aio server with the error's code, message and metadata."""
    _log_if_ours(error)
    await context.abort(status_of(error).grpc_code, message_of(error), trailing_metadata(error))
    raise AssertionError("abort raises")


class CallRefused(Exception):
    """The call has ended with the status that is set on its context."""


async def refuse_by_raising(context: Any, error: Exception) -> NoReturn:
    """Set code, message and metadata on a context that has no `abort`, and raise. Ray Serve's context is of this kind:
    it travels back with the exception, and the proxy answers with what is set on it."""
    _log_if_ours(error)
    context.set_code(status_of(error).grpc_code)
    context.set_details(message_of(error))
    context.set_trailing_metadata(list(trailing_metadata(error)))
    raise CallRefused(message_of(error)) from None


def _log_if_ours(error: Exception) -> None:
    if not isinstance(error, HeadraceError):
        log.error("unexpected error in a gRPC call", exc_info=error)
