"""Names that callers give to their claims before they make them, so that a claim whose reply was lost can be ended.

    caller               node                                 caller                     node
    Lease(name n) ---->  lease l-7, made(n, [l-7])            Lease(name n) --late-->
    cancelled    <-x---  reply                                EndClaims(n) ------------> n has ended
    EndClaims(n) ---->   end(n) = [l-7]: released                          Lease(n) ---> not admitted: nothing is taken

Plain memory of one server; knows nothing of what a claim is.
"""

from collections.abc import Sequence

from headrace.core.limits import CLAIM_NAMES_MAX


class NamedClaims:
    """What was made under each of the last names; beyond CLAIM_NAMES_MAX names and ids the oldest are forgotten."""

    def __init__(self) -> None:
        self._name_to_ids: dict[str, tuple[str, ...]] = {}
        self._size = 0  # names and ids

    def admit(self, name: str) -> bool:
        """Whether a claim may be made under this name: not twice, and not after it was ended. "" is no name."""
        return name not in self._name_to_ids

    def made(self, name: str, ids: Sequence[str]) -> None:
        """A claim was made; it consists of these ids."""
        if name:
            assert name not in self._name_to_ids
            self._put(name, tuple(ids))

    def end(self, name: str) -> tuple[str, ...]:
        """What has to be ended; from now on nothing is made under this name. "" is no name: it has nothing."""
        if not name:
            return ()
        ids = self._name_to_ids.pop(name, None)
        if ids is not None:
            self._size -= 1 + len(ids)
        self._put(name, ())
        return ids or ()

    def _put(self, name: str, ids: tuple[str, ...]) -> None:
        self._name_to_ids[name] = ids
        self._size += 1 + len(ids)
        while self._size > CLAIM_NAMES_MAX:
            self._size -= 1 + len(self._name_to_ids.pop(next(iter(self._name_to_ids))))
