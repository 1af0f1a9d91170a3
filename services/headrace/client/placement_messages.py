"""`admin.proto`'s explanation of a route as plain values."""

from headrace.client.placement_values import RouteExplanation, RouteOutcome, RoutePlan
from headrace.wire.v1 import admin_pb2


def route_explanation_from_message(message: admin_pb2.ExplainRouteReply) -> RouteExplanation:
    """Decode one decision."""
    outcome = message.outcome
    return RouteExplanation(
        request_id=message.request_id,
        model=message.model,
        unix_ms=message.unix_ms,
        prompt_tokens=message.prompt_tokens,
        reason=message.reason,
        settled_by=message.settled_by,
        attempts=message.attempts,
        price=message.price,
        chosen=_plan_from_message(message.chosen),
        others=tuple(_plan_from_message(plan) for plan in message.others),
        num_considered=message.num_considered,
        predicted_ttft_s=message.predicted_ttft_s,
        overhead_s=message.overhead_s,
        outcome=RouteOutcome(
            ttft_s=outcome.ttft_s if outcome.HasField("ttft_s") else None,
            fetch_s=outcome.fetch_s if outcome.HasField("fetch_s") else None,
            compute_s=outcome.compute_s if outcome.HasField("compute_s") else None,
            decode_worker=outcome.decode_worker,
            cached_device_tokens=outcome.cached_device_tokens,
            cached_shared_memory_tokens=outcome.cached_shared_memory_tokens,
            cached_grpc_tokens=outcome.cached_grpc_tokens,
        ),
    )


def _plan_from_message(message: admin_pb2.RoutePlan) -> RoutePlan:
    return RoutePlan(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})
