"""Redis as production code sees it, but for the time that a call may take.

In production an answer that is late is as good as none (INDEX_TIMEOUT_MS). A busy machine may keep a test's server
waiting for longer than that, and then the test would fail for no fault of ours. Tests about that time itself, and about
servers that are gone, make their own.
"""

from functools import partial

from headrace.index.index_mirror import IndexMirror
from headrace.index.redis_connections import RedisConnections
from headrace.index.redis_index import RedisIndex
from headrace.index.redis_membership import RedisMembership

PATIENT_MS = 30_000

patient_connections = partial(RedisConnections, timeout_ms=PATIENT_MS)
patient_index = partial(RedisIndex, timeout_ms=PATIENT_MS)
patient_membership = partial(RedisMembership, timeout_ms=PATIENT_MS)
patient_mirror = partial(IndexMirror, timeout_ms=PATIENT_MS)
