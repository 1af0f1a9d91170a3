"""Options that say which requests a simulation runs: a trace file, or a trace that is made up."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headrace.admin.terminal import say
from headrace.simulate.generate_trace import BLOCK_TOKENS_DEFAULT, Workload, generate_trace, parse_shape
from headrace.simulate.read_trace import USERS_DEFAULT, Trace, read_trace, with_copies

_OPTIONS = (
    click.option(
        "--trace",
        "path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSON lines with input_length and hash_ids, conversations with hash_runs, or texts; or a CSV of lengths. "
        "May be gzipped.",
    ),
    click.option("--generate", type=click.Choice([str(kind) for kind in Workload]), help="Make requests up instead."),
    click.option(
        "--requests", type=click.IntRange(min=1), help="The first so many; how many to make up (2,000 unless told)."
    ),
    click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Of what is made up; repeat for several."
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all that is random."),
    click.option(
        "--copies", type=click.IntRange(1, 1_000), default=1, show_default=True,
        help="Populations like the trace's, side by side.",
    ),
    click.option("--block-tokens", type=click.IntRange(min=1), help="Tokens of a block. Default: what fits."),
    click.option(
        "--merge-blocks", type=click.IntRange(min=1), default=1, show_default=True, help="Replay so many blocks as one."
    ),
    click.option(
        "--users", type=click.IntRange(min=1), default=USERS_DEFAULT, show_default=True,
        help="Conversations replayed at the same time.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What was asked for. `seed` is for what follows too."""

    path: Path | None
    generate: str | None
    requests: int | None
    settings: tuple[str, ...]
    seed: int
    copies: int
    block_tokens: int | None
    merge_blocks: int
    users: int

    def load(self) -> Trace:
        """Read or make up. Raises UsageError unless exactly one of a file and a kind was named."""
        if (self.path is None) == (self.generate is None):
            raise click.UsageError("say which requests: --trace with a file, or --generate with a kind")
        if self.path is not None and self.settings:
            raise click.UsageError("--set is of what --generate makes up; a trace is as it is")
        if self.path is not None:
            trace = read_trace(
                self.path,
                report=say,
                block_tokens=self.block_tokens,
                merge_blocks=self.merge_blocks,
                users=self.users,
                requests_max=self.requests,
            )
        else:
            trace = generate_trace(
                Workload(str(self.generate)),
                requests=self.requests or 2_000,
                seed=self.seed,
                shape=parse_shape(self.settings),
                block_tokens=self.block_tokens or BLOCK_TOKENS_DEFAULT,
            )
        return with_copies(trace, self.copies)


def trace_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets them as `asked`."""

    def with_asked(**given: Any) -> Any:
        names = TraceOptions.__dataclass_fields__
        return command(asked=TraceOptions(**{name: given.pop(name) for name in names}), **given)

    with_asked.__doc__, with_asked.__name__ = command.__doc__, command.__name__
    with_asked.__dict__.update(command.__dict__)  # click keeps options that were added before there
    for option in reversed(_OPTIONS):
        with_asked = option(with_asked)
    return with_asked
