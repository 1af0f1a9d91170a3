"""`headrace doctor`: is everything that should be there there, and does it agree?"""

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.terminal import EXIT_CHECK_FAILED, json_option, print_json, print_table


@click.command(short_help="Check that all parts agree; --fix repairs.")
@click.option("--fix", is_flag=True, help="Have nodes register again where the index is wrong; sweep dead entries.")
@address_option
@json_option
def doctor(*, fix: bool, address: str, as_json: bool) -> None:
    """Check the index, nodes, workers, clocks, versions, namespaces, and samples of the index against the nodes.

    Exit code 1 when something is not well and was not repaired.

    \b
    Examples:
      headrace doctor
      headrace doctor --fix --json
    """
    with connect(address) as client:
        findings = client.doctor(fix=fix)
    if as_json:
        print_json({"findings": findings})
    else:
        rows = [["ok" if each.ok else "PROBLEM", each.check, each.holder, each.detail, each.fixed] for each in findings]
        print_table([" ", "check ", "holder ", "detail ", "repaired "], rows)
    if any(not each.ok and not each.fixed for each in findings):
        raise SystemExit(EXIT_CHECK_FAILED)
