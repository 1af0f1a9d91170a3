"""How a call of grpc.aio ends with an error before any handler has heard of it, who is told of that, and what is logged
of answers that nobody took."""

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from headrace.core.errors import HeadraceError
from headrace.wire.status import message_of, status_of, trailing_metadata

# Hears of each call that is ended so: why, and where it came from ("" where that is not known).
Tell = Callable[[HeadraceError, str], None]


def unheard(error: HeadraceError, peer: str) -> None:
    """Nobody is told."""


async def abort_call(context: Any, error: HeadraceError, *, tell: Tell) -> NoReturn:
    """Tell, then end the call with the error's code, message and metadata. Always raises."""
    tell(error, context.peer())
    await context.abort(status_of(error).grpc_code, message_of(error), trailing_metadata(error))
    raise AssertionError("abort raises")


def say_nothing_of_undelivered() -> None:
    """Have gRPC log no traceback for each answer that it could not deliver, since its caller had left: whoever calls
    and leaves would fill the log. Idempotent."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not str(error).startswith('Failed "execute_batch"')
