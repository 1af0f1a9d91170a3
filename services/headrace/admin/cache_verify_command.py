"""`headrace cache verify`: does a live system answer alike from every place where it caches?"""

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.prompt_options import find_model, model_option
from headrace.admin.terminal import EXIT_CHECK_FAILED, json_option, print_json, print_table, say
from headrace.admin.verify_cache import CacheReport, verify_cache


@click.command("verify", short_help="Check that reuse changes no answer.")
@model_option
@address_option
@json_option
def cache_verify(*, model: str, address: str, as_json: bool) -> None:
    """Check on a live system that reuse changes no answer: on every worker, from every source, across hosts.

    Each worker that decodes is asked for new prompts: cold, from its own memory, from its host's store node, from that
    of each other host, and handed over by each prefill worker. Tokens are compared, and the log-probabilities of the
    likeliest at each place. Takes some requests for each worker and host, and leaves their prompts in the cache. Exit
    code 1 when an answer differs from the cold one.

    \b
    Examples:
      headrace cache verify
      headrace cache verify --address 10.0.0.2:9000 --json
    """
    with connect(address) as client:
        found = verify_cache(client, model=find_model(model, client.list_models()), report=say)
    if as_json:
        print_json(found.as_json())
    else:
        show(found)
    if not found.equal:
        raise SystemExit(EXIT_CHECK_FAILED)


def show(found: CacheReport) -> None:
    """A row for each answer, and the verdict."""
    rows = [
        (
            check.worker,
            check.store_node,
            check.source if check.computed_on in ("", check.store_node) else f"{check.source} from {check.computed_on}",
            f"{check.reused_tokens:,} of {check.expected_tokens:,}" if check.expected_tokens else "-",
            f"{check.ttft_ms:.0f}",
            ("equal" if check.same_bits else "equal tokens, other bits") if check.equal else "DIFFERS",
        )
        for check in found.checks
    ]
    print_table(("worker ", "beside ", "source ", "reused tokens", "TTFT ms", "answer "), rows)
    click.echo(found.verdict())
