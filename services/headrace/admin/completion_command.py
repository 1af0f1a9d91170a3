"""`headrace completion`: the script that makes a shell complete commands and options."""

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

PROGRAM = "headrace"
VARIABLE = "_HEADRACE_COMPLETE"
SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(*, shell: str) -> None:
    """Print the completion script of a shell. Needs no running system.

    \b
    Examples:
      headrace completion bash > ~/.local/share/bash-completion/completions/headrace
      headrace completion zsh > ~/.zfunc/_headrace      (with ~/.zfunc in fpath)
      headrace completion fish > ~/.config/fish/completions/headrace.fish
      eval "$(headrace completion bash)"                (in this shell only)
    """
    root = click.get_current_context().find_root().command
    click.echo(SHELLS[shell](root, {}, PROGRAM, VARIABLE).source())
