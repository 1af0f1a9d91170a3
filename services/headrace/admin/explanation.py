"""`headrace explain`: why a request went where it went, in seconds, and what in fact happened."""

from datetime import UTC, datetime

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.terminal import human_ms, json_option, print_json, print_table
from headrace.client.placement_values import RouteExplanation, RoutePlan

# Terms as columns, with the field of a plan that each shows.
TERMS = {
    "wait": "wait_s",
    "fetch": "fetch_s",
    "compute": "compute_s",
    "hand-off": "hand_off_s",
    "price": "price_s",
    "interference": "interference_s",
    "decode": "decode_s",
    "memory": "memory_s",
}

SETTLED = {
    "asked": "The request named its workers.",
    "cost": "No other plan came within 20 ms of its cost, which is as much as predictions are good for.",
    "held": "Others cost as much within 20 ms; its worker had most of the prompt at hand.",
    "near": "Others cost as much within 20 ms; between its workers there is no network.",
    "load": "Others cost as much within 20 ms; its worker had the fewest sequences.",
    "hash": "Others cost as much within 20 ms and were equal in all that counts: the rendezvous hash decided.",
}


@click.command("explain", short_help="Say why a request went where it went, and what happened.")
@click.argument("request_id")
@address_option
@json_option
def explain(*, request_id: str, address: str, as_json: bool) -> None:
    """Say why a request went where it went: every plan with its terms in seconds, what was chosen, what would have had
    to differ for the next best plan to win, and predictions against what was measured.

    A gateway remembers its last 1,024 requests. The id is in each answer: `id` without its first part in OpenAI's
    shape, `request_id` over gRPC. (The header x-request-id is the caller's own label, or the proxy's.)

    \b
    Examples:
      headrace explain 5f0c1d2e3b4a59687786a5b4
      headrace explain 5f0c1d2e3b4a59687786a5b4 --json
    """
    with connect(address) as client:
        found = client.explain_route(request_id)
    if as_json:
        print_json(found)
        return
    moment = datetime.fromtimestamp(found.unix_ms / 1000, tz=UTC)
    attempts = f"; plan {found.attempts} of this request" if found.attempts > 1 else ""
    click.echo(
        f"request {found.request_id}: {found.prompt_tokens:,} tokens for {found.model},"
        f" {moment:%Y-%m-%d %H:%M:%S} UTC{attempts}"
    )
    click.echo()
    _print_plans(found)
    click.echo()
    click.echo(f"chosen: {_name(found.chosen)} ({found.reason}). {SETTLED.get(found.settled_by, '')}")
    for line in _what_would_differ(found):
        click.echo(line)
    click.echo()
    _print_outcome(found)


def _print_plans(found: RouteExplanation) -> None:
    plans = [found.chosen, *found.others]
    terms = {name: field for name, field in TERMS.items() if any(getattr(plan, field) for plan in plans)}
    rows = []
    for plan in plans:
        name = ("* " if plan is found.chosen else "  ") + _name(plan)
        tokens = [f"{plan.device_tokens:,}", f"{plan.loaded_tokens:,}", f"{plan.computed_tokens:,}"]
        seconds = [_seconds(getattr(plan, field)) for field in (*terms.values(), "ttft_s", "cost_s")]
        rows.append([name, *tokens, *seconds, plan.barred])
    print_table(["  plan ", "at hand", "loaded", "computed", *terms, "first token", "cost", "barred "], rows)
    left_out = found.num_considered - len(rows)
    if left_out > 0:
        click.echo(f"  and {left_out:,} more that cost more")


def _what_would_differ(found: RouteExplanation) -> list[str]:
    """What would have had to differ for the next best plan to be the cheapest."""
    rivals = [plan for plan in found.others if not plan.barred]
    barred = [plan for plan in found.others if plan.barred and plan.cost_s < found.chosen.cost_s]
    lines = [f"{_name(plan)} would cost {_seconds(plan.cost_s)}, but {plan.barred}." for plan in barred[:1]]
    if not rivals:
        return [*lines, "There was no other plan."]
    rival = min(rivals, key=lambda plan: plan.cost_s)
    margin_s = rival.cost_s - found.chosen.cost_s
    if margin_s <= 0:
        return [*lines, f"next best: {_name(rival)}, which costs {_seconds(-margin_s)} less."]
    lines.append(f"next best: {_name(rival)}, which costs {_seconds(margin_s)} more. It would have won with")
    alone = []
    for name, field in TERMS.items():
        theirs, ours = getattr(rival, field), getattr(found.chosen, field)
        if name in ("wait", "fetch"):  # only the longer of the two counts
            spare_s = theirs - min(theirs, rival.fetch_s if name == "wait" else rival.wait_s)
        else:
            spare_s = theirs
        if spare_s >= margin_s:
            alone.append(
                f"  {name} of {_seconds(theirs - margin_s)} instead of {_seconds(theirs)} (here {_seconds(ours)})"
            )
    return lines + (alone or ["  no single term's change: it is behind in several."])


def _print_outcome(found: RouteExplanation) -> None:
    outcome, chosen = found.outcome, found.chosen
    reused = chosen.device_tokens + chosen.loaded_tokens
    after_s = max(0.0, chosen.wait_s - chosen.fetch_s) + chosen.compute_s
    rows = [
        ["first token", _seconds(found.predicted_ttft_s), _seconds(outcome.ttft_s)],
        ["fetch ", _seconds(chosen.fetch_s), _seconds(outcome.fetch_s)],
        ["then wait and compute ", _seconds(after_s), _seconds(outcome.compute_s)],
        ["cached tokens", f"{reused:,}", f"{outcome.cached_tokens:,}" if outcome.decode_worker else "-"],
        ["decode worker ", chosen.decode_worker, outcome.decode_worker or "-"],
    ]
    print_table([" ", "predicted", "measured"], rows)
    click.echo(f"(predicted first token: {_seconds(found.overhead_s)} of it is what predictions lately lacked)")


def _name(plan: RoutePlan) -> str:
    return f"{plan.prefill_worker} > {plan.decode_worker}" if plan.prefill_worker else plan.decode_worker


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return "0" if seconds == 0 else human_ms(1e3 * seconds)
