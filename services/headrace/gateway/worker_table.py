"""The gateway's view of the workers: who lives, who is suspect, how many of this gateway's calls each one has.

All of it lives on the event loop; nothing here waits. The membership service is the truth; a call that fails is fresher
evidence against a worker than its record is for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from headrace.core.block import Namespace
from headrace.core.choose_placement import Floats
from headrace.core.clock import Clock
from headrace.core.errors import UnknownModel, WorkerUnavailable
from headrace.core.generation import RequestId, WorkerId
from headrace.core.limits import MEMBER_REFRESH_MS, WORKER_SUSPECT_MS, WORKER_TABLE_KEEP_MS, WORKER_TABLE_REFRESH_MS
from headrace.core.members import WorkerRecord
from headrace.core.overtaking import WaitingPrompts
from headrace.core.sequence_room import SequenceRoom
from headrace.core.worker_columns import WorkerColumns, tokens_max


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as live workers serve it: all of the same namespace, so any of them can use another's blocks."""

    name: str
    namespace: Namespace
    model_path: str
    tokens_max: int  # prompt plus output of one sequence, on the roomiest decode worker
    workers: tuple[WorkerRecord, ...]
    suspects: frozenset[WorkerId]  # those of them that failed a call lately: the last to be tried

    @property
    def room(self) -> SequenceRoom:
        """Of one sequence, on that worker."""
        roomiest = max((worker for worker in self.workers if worker.role.decodes), key=tokens_max)
        return SequenceRoom(self.tokens_max, self.namespace.layout.block_tokens, roomiest.pool_blocks)


@dataclass(slots=True, eq=False)
class PlannedWork:
    """What one request is predicted to cost one worker until its first token."""

    worker_id: WorkerId
    planned_s: float
    work_s: float


# How long a call takes until the worker's own books have it.
CALL_ARRIVES_S = 0.05

# A record is at most this old when it is read: longer differences are those of two hosts' clocks.
RECORD_AGE_MAX_S = (MEMBER_REFRESH_MS + WORKER_TABLE_REFRESH_MS) / 1000


@dataclass(frozen=True, slots=True)
class _Suspicion:
    incarnation: int
    until_s: float


class WorkerTable:
    """Records, suspicions and in-flight counts. One per gateway."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[WorkerId, WorkerRecord] = {}
        self._empty_since_s: float | None = clock.now_s()  # the first listing that named nobody, of those in a row
        self._suspects: dict[WorkerId, _Suspicion] = {}
        self._in_flight: dict[WorkerId, int] = {}
        self._planned: dict[RequestId, list[PlannedWork]] = {}
        self._told: dict[WorkerId, tuple[int, float]] = {}  # a record's own time, and that on this gateway's clock
        self._models: dict[str, list[ServedModel]] = {}  # of this listing, by name; the usual namespace first
        self._columns: dict[tuple[str, Namespace], WorkerColumns] = {}  # of this listing
        self._told_s: dict[WorkerColumns, Floats] = {}  # the same times as in `_told`, by row

    def replace(self, records: Sequence[WorkerRecord]) -> None:
        """Take over a fresh listing.

        Empty ones are not believed for `WORKER_TABLE_KEEP_MS`, from the first of them on, however long there was none
        at all before: a Redis that came back empty knows nobody until the workers announce themselves again, and calls
        to a dead worker fail quickly by themselves.
        """
        now_s = self._clock.now_s()
        if records:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now_s
        if self._empty_since_s is not None and now_s - self._empty_since_s < WORKER_TABLE_KEEP_MS / 1000:
            return
        self._records = dict(sorted((record.worker_id, record) for record in records))
        self._models = _served_models(self.records())
        self._told = {record.worker_id: self._when_told(record, now_s) for record in records}
        self._columns.clear()
        self._told_s.clear()
        self._suspects = {
            worker_id: suspicion
            for worker_id, suspicion in self._suspects.items()
            if suspicion.until_s > now_s and self._incarnation(worker_id) <= suspicion.incarnation
        }

    def suspect(self, worker_id: WorkerId) -> None:
        """Choose this worker last until its record has had time to expire, or it comes back as a new incarnation."""
        self._suspects[worker_id] = _Suspicion(
            incarnation=self._incarnation(worker_id), until_s=self._clock.now_s() + WORKER_SUSPECT_MS / 1000
        )

    def records(self) -> tuple[WorkerRecord, ...]:
        """Every worker of the last listing, suspect or not, by id."""
        return tuple(self._records.values())

    def live(self) -> tuple[WorkerRecord, ...]:
        """Workers with nothing against them, by id."""
        return tuple(record for record in self.records() if not self._is_suspect(record))

    def can_decode(self) -> bool:
        """Whether any request could be served now."""
        return any(record.role.decodes for record in self.live())

    def models(self) -> tuple[ServedModel, ...]:
        """Every model that some known decode worker serves, by name."""
        return tuple(self.served(name) for name in sorted(self._models))

    def served(self, model: str, decode_worker: WorkerId | None = None) -> ServedModel:
        """Resolve a model's name; "" is the only model there is. Raises UnknownModel, WorkerUnavailable.

        Workers of one model may differ in namespace for a while (an upgrade, another CPU type). A request stays within
        one: that of the decode worker it names, else the one with most decode workers, ties by id.
        """
        if not self._models:
            raise WorkerUnavailable("", "no decode worker is ready yet")
        if not model and len(self._models) == 1:
            model = next(iter(self._models))
        if model not in self._models:
            raise UnknownModel(model, sorted(self._models))
        served, *variants = self._models[model]
        asked = self._records.get(decode_worker) if decode_worker is not None and variants else None
        if asked is not None and asked.model == model and asked.role.decodes:
            served = next((each for each in variants if each.namespace == asked.namespace), served)
        suspects = frozenset(r.worker_id for r in served.workers if self._is_suspect(r)) if self._suspects else None
        return replace(served, suspects=suspects) if suspects else served

    def columns(self, served: ServedModel) -> WorkerColumns:
        """The model's workers as arrays, made once for each listing."""
        key = (served.name, served.namespace)
        if key not in self._columns:
            self._columns[key] = WorkerColumns(served.workers)
        return self._columns[key]

    def queue_s(self, columns: WorkerColumns) -> Floats:
        """Predicted seconds until a prompt that is sent now could begin, on each worker: what its record said, less the
        time since, and this gateway's own plans that the record cannot know of."""
        now_s = self._clock.now_s()
        if columns not in self._told_s:
            self._told_s[columns] = np.array([self._told[record.worker_id][1] for record in columns.records])
        told_s = self._told_s[columns]
        queue_s: Floats = np.maximum(columns.queue_s - (now_s - told_s), 0.0)
        planned: dict[int, list[PlannedWork]] = {}
        for parts in self._planned.values():
            for part in parts:
                row = columns.row_of.get(part.worker_id)
                if row is not None and self._is_later(part):
                    planned.setdefault(row, []).append(part)
        for row, later in planned.items():
            queue_s[row] = _with_later(columns.queue_s[row], told_s[row], later, now_s)
        return queue_s

    def waiting(self, columns: WorkerColumns) -> WaitingPrompts | None:
        """This gateway's prompts that have no first token yet, those that records know of as well; None without any."""
        now_s = self._clock.now_s()
        row_of = columns.row_of
        parts = [part for parts in self._planned.values() for part in parts if part.worker_id in row_of]
        if not parts:
            return None
        return WaitingPrompts(
            rows=np.array([row_of[part.worker_id] for part in parts], dtype=np.int64),
            work_s=np.array([part.work_s for part in parts], dtype=np.float64),
            waited_s=np.array([now_s - part.planned_s for part in parts], dtype=np.float64),
        )

    def plan_work(self, request_id: RequestId, worker_id: WorkerId, work_s: float) -> None:
        """This gateway sends a request's work to a worker; until its record can know of it, the table does."""
        self._planned.setdefault(request_id, []).append(PlannedWork(worker_id, self._clock.now_s(), work_s))

    def take_back(self, request_id: RequestId, worker_id: WorkerId) -> None:
        """One part of a request's work, planned for this worker, is not done there; without one, nothing."""
        parts = self._planned.get(request_id, [])
        part = next((part for part in parts if part.worker_id == worker_id), None)
        if part is not None:
            parts.remove(part)
            if not parts:
                del self._planned[request_id]

    def end_work(self, request_id: RequestId) -> None:
        """The request's prompt is computed, or nobody wants it any more. Idempotent."""
        self._planned.pop(request_id, None)

    @contextmanager
    def in_flight(self, worker_id: WorkerId) -> Iterator[None]:
        """Count one call to a worker for as long as the scope lasts, however it ends."""
        self._in_flight[worker_id] = self._in_flight.get(worker_id, 0) + 1
        try:
            yield
        finally:
            self._in_flight[worker_id] -= 1
            if not self._in_flight[worker_id]:
                del self._in_flight[worker_id]

    def in_flight_counts(self) -> Mapping[WorkerId, int]:
        """Calls of this gateway that are under way, by worker; empty at rest."""
        return dict(self._in_flight)

    def check_integrity(self) -> None:
        """Counts are positive, no request is kept without work, records lie under their own id."""
        assert all(count > 0 for count in self._in_flight.values())
        assert all(self._planned.values())
        assert all(worker_id == record.worker_id for worker_id, record in self._records.items())

    def _is_suspect(self, record: WorkerRecord) -> bool:
        suspicion = self._suspects.get(record.worker_id)
        if suspicion is None or suspicion.until_s <= self._clock.now_s():
            return False
        return record.incarnation <= suspicion.incarnation

    def _is_later(self, part: PlannedWork) -> bool:
        """Whether a worker's record cannot know of this work yet."""
        told = self._told.get(part.worker_id)
        return told is None or part.planned_s + CALL_ARRIVES_S > told[1]

    def _incarnation(self, worker_id: WorkerId) -> int:
        record = self._records.get(worker_id)
        return record.incarnation if record else 0

    def _when_told(self, record: WorkerRecord, now_s: float) -> tuple[int, float]:
        """When a record was made, on this gateway's clock; the same for as long as it is the same record."""
        known = self._told.get(record.worker_id)
        if known is not None and known[0] == record.unix_ms:
            return known
        age_s = (self._clock.unix_ms() - record.unix_ms) / 1000 if record.unix_ms else 0.0
        return record.unix_ms, now_s - min(max(age_s, 0.0), RECORD_AGE_MAX_S)


def _served_models(records: Sequence[WorkerRecord]) -> dict[str, list[ServedModel]]:
    """Models that have a decode worker, by name; of their namespaces the one with most decode workers first."""
    groups: dict[tuple[str, Namespace], list[WorkerRecord]] = {}
    for record in records:
        groups.setdefault((record.model, record.namespace), []).append(record)
    models: dict[str, list[tuple[int, str, ServedModel]]] = {}
    for (name, namespace), workers in groups.items():
        decoders = [record for record in workers if record.role.decodes]
        if decoders:
            served = ServedModel(
                name=name,
                namespace=namespace,
                model_path=next((record.model_path for record in decoders if record.model_path), ""),
                tokens_max=max(map(tokens_max, decoders)),
                workers=tuple(workers),
                suspects=frozenset(),
            )
            models.setdefault(name, []).append((-len(decoders), namespace.id, served))
    return {name: [served for *_, served in sorted(variants, key=lambda v: v[:2])] for name, variants in models.items()}


def _with_later(queue_s: float, told_s: float, later: Sequence[PlannedWork], now_s: float) -> float:
    """What is left of a queue that had `queue_s` at `told_s`, and took on more since, each as it was planned."""
    at_s = told_s
    for part in later:
        queue_s = max(0.0, queue_s - max(0.0, part.planned_s - at_s)) + part.work_s
        at_s = max(at_s, part.planned_s)
    return max(0.0, queue_s - (now_s - at_s))
