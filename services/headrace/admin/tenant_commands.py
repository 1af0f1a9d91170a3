"""`headrace tenants ...`: who has how much of each store node and what each may have; API keys for the tenants file."""

import sys
from collections.abc import Iterator, Sequence

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.selection import Size, Words
from headrace.admin.terminal import (
    exit_if_incomplete,
    human_bytes,
    human_seconds,
    json_option,
    print_json,
    print_table,
    say,
)
from headrace.client import HeadraceClient, QuotaChange, TenantEntry
from headrace.core.errors import InvalidRequest
from headrace.core.limits import API_KEY_CHARS_MIN
from headrace.core.tenants import HashedKey, is_usable_key, new_key


@click.group(short_help="See and set who may have how much; API keys.")
def tenants() -> None:
    """Tenants: who may call, how much each may have, and API keys (docs/tenants.md)."""


@tenants.command("ls", short_help="List tenants and what each has.")
@address_option
@json_option
def list_tenants(*, address: str, as_json: bool) -> None:
    """List tenants with their budgets, and what each has on each store node.

    A quota and a protected minimum hold on each node by itself, rates on each gateway. Tenants of one trust group
    share quota and minimum, and what is used. Refused and evicted blocks are those that the quota left no room for,
    since the node started.

    \b
    Examples:
      headrace tenants ls
      headrace tenants ls --json | jq -r '.tenants[] | select(.bytes_max == null) | .name'
    """
    with connect(address) as client:
        found = client.list_tenants()
    if as_json:
        print_json({"tenants": found.tenants, "errors": dict(found.errors)})
    else:
        _print_tenants(found.tenants)
    exit_if_incomplete(found.errors)


@tenants.command("quota", short_help="Set a tenant's quota and minimum.")
@click.argument("name", metavar="TENANT", type=Words())
@click.option("--max", "bytes_max", type=Size(), help="Quota on each node, in the arena and on disk each: 2GB, 500MiB.")
@click.option("--min", "bytes_min", type=Size(), help="What others cannot evict of the arena of each node: 500MB.")
@click.option("--none", "no_quota", is_flag=True, help="No quota; without --min no protected minimum either.")
@click.option("--reset", is_flag=True, help="Back to what the tenants file says.")
@address_option
@json_option
def set_quota(
    *,
    name: str,
    bytes_max: int | None,
    bytes_min: int | None,
    no_quota: bool,
    reset: bool,
    address: str,
    as_json: bool,
) -> None:
    """Set a tenant's quota and protected minimum on each store node, until it is set again. Only an admin may.

    Of --max and --min the one that is left out stays as it is. What a new quota leaves no room for goes from the
    arena within about a second, its oldest first. A node that is away is told when it is seen again; until then
    the exit code is 9.

    \b
    Examples:
      headrace tenants quota acme --max 2GB --min 500MB
      headrace tenants quota acme --none
      headrace tenants quota acme --reset
    """
    sizes = bytes_max is not None or bytes_min is not None
    if not (sizes or no_quota or reset):
        raise click.UsageError("say --max and/or --min, --none or --reset")
    if reset and (sizes or no_quota):
        raise click.UsageError("--reset stands alone")
    if no_quota and bytes_max is not None:
        raise click.UsageError("--none and --max contradict each other; leave one out")
    with connect(address) as client:
        if reset:
            change = client.reset_quota(name)
        else:
            change = _set_sizes(client, name, bytes_max, bytes_min, no_quota=no_quota)
    if as_json:
        print_json({"tenant": change.tenant, "errors": dict(change.errors)})
    else:
        _print_tenants([change.tenant])
    exit_if_incomplete(change.errors)


def _set_sizes(
    client: HeadraceClient, name: str, bytes_max: int | None, bytes_min: int | None, *, no_quota: bool
) -> QuotaChange:
    """What is not said stays as it is; --none says both."""
    if no_quota:
        return client.set_quota(name, bytes_max=None, bytes_min=bytes_min or 0)
    if bytes_max is None or bytes_min is None:
        known = next((tenant for tenant in client.list_tenants().tenants if tenant.name == name), None)
        if known is None:
            raise InvalidRequest(f"there is no tenant {name[:80]!r} (`headrace tenants ls`)", param="tenant")
        bytes_max = known.bytes_max if bytes_max is None else bytes_max
        bytes_min = known.bytes_min if bytes_min is None else bytes_min
    return client.set_quota(name, bytes_max=bytes_max, bytes_min=bytes_min)


def _print_tenants(found: Sequence[TenantEntry]) -> None:
    columns = [
        "tenant ",
        "role ",
        "trust group ",
        "quota",
        "minimum",
        "set by ",
        "TTL",
        "req/min",
        "tok/min",
        "at once",
    ]
    columns += ["node ", "arena", "disk", "pinned", "refused", "evicted"]
    print_table(columns, [row for tenant in found for row in _tenant_rows(tenant)])
    if not found:
        say("there are no tenants: this deployment has no tenants file (docs/tenants.md)")


def _tenant_rows(tenant: TenantEntry) -> Iterator[list[str]]:
    """One row for each node; what does not depend on the node stands in the first."""
    about = [
        tenant.name,
        tenant.role,
        tenant.trust_group or "-",
        "-" if tenant.bytes_max is None else human_bytes(tenant.bytes_max),
        human_bytes(tenant.bytes_min) if tenant.bytes_min else "-",
        tenant.budget_from or "-",
        "-" if tenant.ttl_s is None else human_seconds(tenant.ttl_s),
        *(
            "-" if bound is None else f"{bound:,}"
            for bound in (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.concurrent_max)
        ),
    ]
    for node in tenant.nodes:
        yield [
            *about,
            node.holder,
            human_bytes(node.host_bytes),
            human_bytes(node.disk_bytes),
            human_bytes(node.pinned_bytes),
            f"{node.refused_blocks:,}",
            f"{node.evicted_blocks:,}",
        ]
        about = [""] * len(about)
    if not tenant.nodes:
        yield [*about, "-", "-", "-", "-", "-", "-"]


@tenants.command("new-key", short_help="Draw a fresh API key.")
@json_option
def new_key_command(*, as_json: bool) -> None:
    """Draw a fresh API key and print it with its line for the tenants file.

    The key is shown this once and kept nowhere: give it to the tenant. The line is what the file holds. Needs no
    running system, as hash-key does not.

    \b
    Example:
      headrace tenants new-key
    """
    key = new_key()
    line = HashedKey.of(key).spell()
    if as_json:
        print_json({"key": key, "line": line})
        return
    click.echo(f"key:  {key}")
    click.echo(f"line: {line}")
    say("give the key to the tenant (it is kept nowhere), and put the line under the tenant's keys")


@tenants.command("hash-key", short_help="Make the tenants file's line of a key.")
@json_option
def hash_key_command(*, as_json: bool) -> None:
    """Print the tenants file's line for an API key that you have; the key comes from standard input.

    It is not taken from the command line, which other users see, and it is not printed.

    \b
    Examples:
      headrace tenants hash-key                      asks, without showing what you type
      headrace tenants hash-key < secret-file
    """
    if sys.stdin.isatty():
        key = str(click.prompt("API key", hide_input=True, err=True)).strip()
    else:  # as bytes: what is no text is no key, and is told as such
        key = sys.stdin.buffer.readline().decode("ascii", errors="replace").strip()
    if not is_usable_key(key):
        raise InvalidRequest(
            f"an API key is at least {API_KEY_CHARS_MIN} signs of printable ASCII without spaces; `headrace tenants"
            " new-key` makes one",
            param="key",
        )
    line = HashedKey.of(key).spell()
    if as_json:
        print_json({"line": line})
    else:
        click.echo(line)
