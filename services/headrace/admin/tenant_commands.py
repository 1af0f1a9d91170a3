"""`headrace tenants ...`: API keys for the tenants file. Works on this machine alone; no gateway is asked."""

import click

from headrace.admin.terminal import json_option, print_json, say
from headrace.core.errors import InvalidRequest
from headrace.core.limits import API_KEY_CHARS_MIN
from headrace.core.tenants import HashedKey, is_usable_key, new_key


@click.group()
def tenants() -> None:
    """Tenants: who may call, and with whom each shares cached blocks (docs/tenants.md)."""


@tenants.command("new-key")
@json_option
def new_key_command(*, as_json: bool) -> None:
    """Draw a fresh API key and print it with its line for the tenants file.

    The key is shown this once and kept nowhere: give it to the tenant. The line is what the file holds.

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


@tenants.command("hash-key")
@json_option
def hash_key_command(*, as_json: bool) -> None:
    """Print the tenants file's line for an API key that you have; the key comes from standard input.

    It is not taken from the command line, which other users see, and it is not printed.

    \b
    Examples:
      headrace tenants hash-key                      asks, without showing what you type
      headrace tenants hash-key < secret-file
    """
    stream = click.get_text_stream("stdin")
    key = click.prompt("API key", hide_input=True, err=True) if stream.isatty() else stream.readline()
    key = key.strip()
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
