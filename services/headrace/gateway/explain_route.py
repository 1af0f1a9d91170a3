"""The answer to "why did this request go there": a decision as this gateway remembers it, and what became of it."""

import dataclasses

from headrace.core.block import CacheSource
from headrace.core.decision import PlanTerms
from headrace.core.errors import InvalidRequest
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.recent_decisions import DecidedRequest, RecentDecisions
from headrace.wire.v1 import admin_pb2


def explain_route(
    request: admin_pb2.ExplainRouteRequest, decisions: RecentDecisions, scope: AdminScope
) -> admin_pb2.ExplainRouteReply:
    """Explain one of the last requests. Raises InvalidRequest when this gateway does not remember it, or when it is
    another tenant's: a caller cannot tell these apart."""
    decided = decisions.find(request.request_id)
    if decided is None or not (scope.sees_all or decided.trust_group == scope.tenant.trust_group):
        raise InvalidRequest(
            f"request {request.request_id[:64]!r} is not among the last {decisions.requests_max:,} that this gateway"
            " placed",
            param="request_id",
        )
    decision = decided.decision
    return admin_pb2.ExplainRouteReply(
        request_id=decided.request_id,
        model=decided.model,
        unix_ms=decided.unix_ms,
        prompt_tokens=decision.prompt_tokens,
        reason=decided.reason.value,
        settled_by=decision.settled_by.value,
        attempts=decided.attempts,
        price=decision.price,
        chosen=_plan(decision.chosen),
        others=[_plan(terms) for terms in decision.others],
        num_considered=decision.num_considered,
        predicted_ttft_s=decided.predicted_ttft_s,
        overhead_s=decided.overhead_s,
        outcome=_outcome(decided),
    )


def _plan(terms: PlanTerms) -> admin_pb2.RoutePlan:
    fields = {field.name: getattr(terms, field.name) for field in dataclasses.fields(terms)}
    return admin_pb2.RoutePlan(**fields | {"prefill_worker": terms.prefill_worker or ""})


def _outcome(decided: DecidedRequest) -> admin_pb2.RouteOutcome:
    outcome = admin_pb2.RouteOutcome()
    if decided.ttft_s is not None:
        outcome.ttft_s = decided.ttft_s
    if decided.work is not None:
        outcome.fetch_s, outcome.compute_s = decided.work.load_s, decided.work.compute_s
    if decided.finished is not None:
        cached = decided.finished.usage.cached.by_source()
        outcome.decode_worker = decided.finished.worker_id
        outcome.cached_device_tokens = cached[CacheSource.DEVICE]
        outcome.cached_shared_memory_tokens = cached[CacheSource.SHARED_MEMORY]
        outcome.cached_grpc_tokens = cached[CacheSource.GRPC]
    return outcome
