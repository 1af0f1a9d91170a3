"""Every error that Headrace raises on purpose.

    HeadraceError
    ├── InvalidRequest        the caller must change the request      (param)
    │   ├── UnsupportedField  it asks for what is not done here       (param)
    │   ├── UnknownModel      no worker serves that model             (model, known)
    │   ├── ContextExceeded   prompt plus output does not fit         (tokens_max)
    │   └── RequestTooLarge   refused before it is read               (bytes_max)
    ├── Unauthenticated       no API key, or none that is known       ()
    ├── PermissionDenied      the key's role does not allow this      (what)
    ├── Overloaded            the system is full, try again later     (retry_after_ms)
    │   ├── TenantOverShare   the caller's tenant has its share       (retry_after_ms)
    │   └── RateLimited       the tenant's own rate is used up        (limit, retry_after_ms)
    ├── WorkerUnavailable     the worker died, left or cannot serve   (worker_id)
    ├── DeadlineExceeded      time is up                              (what)
    ├── ModelRefused          this model cannot be served or cached   (model, why)
    ├── ConfigInvalid         start is refused                        (key)
    └── CacheFault            never reaches a client: a recompute and a counter
        ├── BlockMissing      gone between lookup and fetch           (block_hash)
        ├── BlockCorrupt      header or checksum does not match       (block_hash, why)
        ├── StoreUnavailable  a store node does not answer            (node_id)
        ├── StoreFull         no slot to be had, or no parent there   (needed_blocks)
        ├── LeaseExpired      lease or reservation is gone            (lease_id)
        └── IndexUnavailable  Redis slow or away                      ()

The message names the consequence and the remedy. gRPC codes and HTTP statuses are given in `wire/status.py` only.
"""

from collections.abc import Sequence
from typing import Any


class HeadraceError(Exception):
    """Root of the tree; catch a narrower one. Crosses process borders whole: message and fields survive pickling."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), vars(self))


def _rebuild(kind: type[HeadraceError], message: str, fields: dict[str, Any]) -> HeadraceError:
    """Make an error again without its __init__, whose arguments are not its message."""
    error = kind.__new__(kind)
    error.args = (message,)
    vars(error).update(fields)
    return error


class InvalidRequest(HeadraceError):
    """The request itself is wrong; sending it again unchanged fails again."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedField(InvalidRequest):
    """The request has a field, or a value of one, that asks for something which is not done here."""


class UnknownModel(InvalidRequest):
    """No worker serves the named model."""

    def __init__(self, model: str, known: Sequence[str]) -> None:
        named = ", ".join(sorted(known)) or "none yet"
        super().__init__(f"model {model[:200]!r} is not served here; served: {named}", param="model")
        self.model = model
        self.known = tuple(known)


class ContextExceeded(InvalidRequest):
    """Prompt, or prompt plus output, is longer than the model's context (or than a worker's pool)."""

    def __init__(self, message: str, *, tokens_max: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.tokens_max = tokens_max


class RequestTooLarge(InvalidRequest):
    """The request has more bytes than the server reads."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the request is larger than {bytes_max} bytes; nothing was started, send less")
        self.bytes_max = bytes_max


class Unauthenticated(HeadraceError):
    """The call carries no API key, or one that is not known here. Never says which keys are."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; send an API key of this deployment as `Authorization: Bearer KEY`")


class PermissionDenied(HeadraceError):
    """The caller is known and may not do this."""

    def __init__(self, what: str) -> None:
        super().__init__(f"this API key may not {what}; it takes a key of a tenant with the role admin")
        self.what = what


class Overloaded(HeadraceError):
    """A bound was reached; nothing was started."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(f"{message}; try again in {retry_after_ms} ms")
        self.retry_after_ms = retry_after_ms


class TenantOverShare(Overloaded):
    """The caller's tenant has as much under way as it may while others need room; others are served."""


class RateLimited(Overloaded):
    """The caller's tenant has asked for as much as it may for now; others are served."""

    def __init__(self, limit: str, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.limit = limit  # requests_per_minute, tokens_per_minute or concurrent_max


class WorkerUnavailable(HeadraceError):
    """The worker that held the request died, left or refused; another attempt may succeed."""

    def __init__(self, worker_id: str, why: str) -> None:
        super().__init__(f"worker {worker_id or '(none)'} is unavailable: {why}")
        self.worker_id = worker_id
        self.why = why


class DeadlineExceeded(HeadraceError):
    """The request's time is up while waiting for `what`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"deadline exceeded: {what}")
        self.what = what


class ModelRefused(HeadraceError):
    """This model cannot be served (or not cached) correctly; the message says why."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"model {model!r} is refused: {why}")
        self.model = model
        self.why = why


class ConfigInvalid(HeadraceError):
    """A setting is wrong; start is refused."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"setting {key!r}: {why}")
        self.key = key
        self.why = why


class CacheFault(HeadraceError):
    """Something about the cache is wrong. The answer is a recompute and a counter, never a failed request."""


class BlockMissing(CacheFault):
    """The block was there at lookup and is not now."""

    def __init__(self, block_hash: bytes) -> None:
        super().__init__(f"block {block_hash.hex()} is gone; it will be recomputed")
        self.block_hash = block_hash


class BlockCorrupt(CacheFault):
    """Header or checksum does not match what was asked for."""

    def __init__(self, block_hash: bytes, why: str) -> None:
        super().__init__(f"block {block_hash.hex()} is not usable ({why}); it will be recomputed")
        self.block_hash = block_hash
        self.why = why


class StoreUnavailable(CacheFault):
    """A store node does not answer in time or at all."""

    def __init__(self, node_id: str, why: str) -> None:
        super().__init__(f"store node {node_id} is unavailable: {why}")
        self.node_id = node_id
        self.why = why


class StoreFull(CacheFault):
    """The store node takes no more: nothing is there that it may evict, a quota is full, or it lacks the parent."""

    def __init__(self, needed_blocks: int) -> None:
        super().__init__(
            f"{needed_blocks} blocks not stored: the node has no room that it may free, or lacks what they stand on"
        )
        self.needed_blocks = needed_blocks


class LeaseExpired(CacheFault):
    """The lease or reservation expired, was released, or never was."""

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id[:64]} is not held any more")
        self.lease_id = lease_id


class IndexUnavailable(CacheFault):
    """Redis is slow, away or refuses; lookups miss until it is back."""

    def __init__(self, why: str) -> None:
        super().__init__(f"index unavailable: {why}; requests go on without reuse")
        self.why = why
