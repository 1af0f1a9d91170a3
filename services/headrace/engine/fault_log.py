"""What goes wrong in an engine's steps, in the worker's log: each cause once, with its traceback.

Every request that is lost is told the kind and the message of its error, and the gateway says so in a line. Where in
the code it came from would be said by nobody; and a broken engine that said it for every request would fill a disk.
"""

import logging
import traceback

log = logging.getLogger(__name__)


class FaultLog:
    """One engine's faults. A cause is a kind of error at a line of code, so there are no more than lines of code."""

    def __init__(self) -> None:
        self._told: set[tuple[type[BaseException], str, int | None]] = set()

    def tell(self, what: str, error: Exception) -> None:
        """Log `what` with the error's traceback, unless this cause was told before."""
        raised = traceback.extract_tb(error.__traceback__)[-1]
        cause = (type(error), raised.filename, raised.lineno)
        if cause not in self._told:
            self._told.add(cause)
            log.error("%s; the same cause is not told again", what, exc_info=error)
