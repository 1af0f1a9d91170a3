"""How many prefill and decode workers there should be: a Ray Serve autoscaling policy by the promised latencies.

Each worker tells how near it is to its limit, as one number (`pressure`): 1 means that one more request would miss a
target. The policy has as many workers as keep all of them below it. Serve itself applies the delays and the bounds
(`serve_app.py`), for each kind of worker apart. Its interface for policies is alpha; this file is the one use of it.
"""

import math
from collections.abc import Sequence
from typing import Any

from ray.serve.config import AutoscalingContext

from headrace.config import Config
from headrace.core.members import WorkerRecord

PRESSURE = "headrace_pressure"

# Of the time to the first token, what may be spent in the queue: the rest is computing, loading and the hand-off.
QUEUE_SHARE_OF_TTFT = 0.5
# Without a target for the first token: a second of prompts before a new one is where waiting is felt.
QUEUE_S_WITHOUT_TARGET = 1.0
# A batch that is fuller than this has no room for the requests that come while another worker starts.
BATCH_SHARE = 0.8
# Fewer workers only when these would be used no more than this: else the next minute takes it back.
SCALE_IN_BELOW = 0.6


def scale_workers(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's call, for one deployment: the number of workers that is wanted now, before delays and bounds."""
    by_replica = (context.aggregated_metrics or {}).get(PRESSURE, {})
    return wanted_workers(list(by_replica.values()), running=context.target_num_replicas), {}


def wanted_workers(pressures: Sequence[float], *, running: int) -> int:
    """Workers that carry the load of those that told theirs, each below a pressure of 1.

    Workers that have not told yet count as carrying nothing. Without any news the number stays.
    """
    if not pressures:
        return running
    load = sum(pressures)
    needed = math.ceil(load)
    return needed if needed > running else min(running, max(1, math.ceil(load / SCALE_IN_BELOW)))


def pressure(worker: WorkerRecord, config: Config) -> float:
    """How near a worker is to missing a target: the nearest of its queue, its batch and its steps counts."""
    ttft_s, itl_s = config.gateway.ttft_slo_ms / 1000, config.gateway.itl_slo_ms / 1000
    parts = [worker.queue_s / (QUEUE_SHARE_OF_TTFT * ttft_s if ttft_s else QUEUE_S_WITHOUT_TARGET)]
    if worker.role.decodes:
        parts.append((worker.running + worker.waiting) / (BATCH_SHARE * config.engine.batch_sequences_max))
        if itl_s and worker.running:
            step_s = worker.costs.decode_base_s + worker.costs.decode_sequence_s * worker.running
            parts.append(step_s / itl_s)
    return max(parts)
