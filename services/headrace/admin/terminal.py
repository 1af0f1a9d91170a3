"""What people and scripts see: tables, sizes with units, JSON, exit codes.

Rules: results go to stdout, remarks and progress to stderr, so that output can be piped; plain text where stdout is no
terminal; `--json` prints JSON and nothing else on stdout: one document, or one a line where a command has many things
to print, one after the other (`json_lines_option`).
"""

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any

import click
from rich.cells import cell_len

from headrace.client import GatewayUnreachable
from headrace.core.errors import (
    ConfigInvalid,
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    ModelRefused,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    WorkerUnavailable,
)

JSON_KEY = "headrace.json"
COLUMN_GAP = "   "
FOLDED_CHARS_MIN = 24  # narrower than this, text is a ladder of single words
# What users sent is shown too (`--text`): it must not steer the terminal of who looks at it.
CONTROL_TO_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
CONTROL_TO_SHOWN |= dict.fromkeys(b"\t\n\r", " ")
# Nor show it other signs than are there: these turn the direction of what follows, also behind the cell's end.
CONTROL_TO_SHOWN |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
UNIX_MS_MAX = 253_402_300_799_000  # the last second of the year 9999, which is the last that datetime has

# Narrower classes first; 2 is click's own (wrong usage).
EXIT_CODES: tuple[tuple[type[HeadraceError], int], ...] = (
    (InvalidRequest, 3),
    (Overloaded, 4),
    (WorkerUnavailable, 5),
    (GatewayUnreachable, 6),
    (DeadlineExceeded, 7),
    (Unauthenticated, 10),
    (PermissionDenied, 10),
    (ConfigInvalid, 8),
    (ModelRefused, 8),
    (HeadraceError, 1),
)
EXIT_CHECK_FAILED = 1
EXIT_BAD_SETTING = 8
EXIT_INCOMPLETE = 9
EXIT_INTERRUPTED = 130
EXIT_CODE_HELP = """\b
Exit codes:
  0  done
  1  a check found a difference, a disk is full, or an error without a class of its own
  2  wrong usage
  3  the request is invalid, or the model is not served
  4  overloaded: try again later
  5  a worker is unavailable
  6  no gateway answers at the address
  7  the deadline passed
  8  a setting is wrong, a model is refused, or an extra is not installed
  9  incomplete: a holder did not answer or refused, or there was no room for all
  10  no API key that is known here, or one that may not do this
  130  interrupted
"""


class ExtraMissing(ConfigInvalid):
    """A command needs an optional part of the package that is not installed."""

    def __init__(self, command: str, extra: str, missing: str) -> None:
        HeadraceError.__init__(
            self, f"`headrace {command}` needs the Python module {missing!r}: pip install 'headrace[{extra}]'"
        )
        self.key, self.why = extra, missing


def exit_code_of(error: HeadraceError) -> int:
    """The exit code of an error's class."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


class ErrorGroup(click.Group):
    """A command group that turns typed errors into a message and an exit code; with --json also into JSON."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Only the root turns errors into exits."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if ctx.parent is not None:
                raise
            click.echo("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except OSError as error:
            # Of a file that the command line named, or a full disk. A closed pipe is click's to judge, and what has no
            # number comes from no system call.
            if ctx.parent is not None or error.errno in (None, errno.EPIPE):
                raise
            where = "" if error.filename is None else f"{error.filename}: "
            with suppress(OSError):  # stdout may be what is full
                _tell("OSError", f"{where}{error.strerror}", as_json=_is_json(ctx))
            _forget_unwritten_output()
            ctx.exit(EXIT_CHECK_FAILED)
        except HeadraceError as error:
            if ctx.parent is not None:
                raise
            tell_error(error, as_json=_is_json(ctx))
            ctx.exit(exit_code_of(error))


def tell_error(error: HeadraceError, *, as_json: bool) -> None:
    """Say an error, and for scripts print it as well."""
    _tell(public_name(error), str(error), as_json=as_json)


def _tell(kind: str, message: str, *, as_json: bool) -> None:
    say(f"error: {message}")
    if as_json:
        print_json_line({"error": {"type": kind, "message": message}})


def _is_json(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(JSON_KEY))


def _forget_unwritten_output() -> None:
    """What stdout did not take is tried again when Python ends, and would change the exit code there."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def public_name(error: HeadraceError) -> str:
    """The class that callers know: of the core's tree or the client's, not a private subclass of it."""
    return next(kind.__name__ for kind, _ in EXIT_CODES if isinstance(error, kind))


def json_option(command: Any) -> Any:
    """Add `--json`, which the command gets as `as_json`."""
    return _json_option(command, "Print one JSON document.")


def json_lines_option(command: Any) -> Any:
    """Add `--json` to a command that has many things to print, one after the other."""
    return _json_option(command, "Print JSON documents, one a line.")


def _json_option(command: Any, text: str) -> Any:
    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[JSON_KEY] = value
        return value

    return click.option("--json", "as_json", is_flag=True, callback=remember, help=text)(command)


def print_json(value: Any) -> None:
    """Print a value as one JSON document; bytes become hex, dataclasses objects."""
    click.echo(json.dumps(to_jsonable(value), indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """The same on one line."""
    click.echo(json.dumps(to_jsonable(value), ensure_ascii=False))


def to_jsonable(value: Any) -> Any:
    """Dataclasses, tuples, sets and bytes in JSON's own types."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(part) for part in value]
    return value


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table. Columns whose name ends in a space are aligned left, all others right, as numbers are."""
    if title:
        click.secho(title, bold=True)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(columns, rows, width=width):
        click.echo(line)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """The lines of a table, each column as wide as its widest cell.

    width: of the terminal; None folds nothing. Only the last column is folded to fit it, only where that is text, and
    only between words: a hash in pieces cannot be copied, so a line that is longer still is the terminal's to wrap, as
    it wraps other programs' tables.
    """
    cells = [[cell.translate(CONTROL_TO_SHOWN) for cell in row] for row in ([name.strip() for name in columns], *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    before = sum(widths[:-1]) + len(COLUMN_GAP) * (len(widths) - 1)
    left = width - before if width is not None and columns[-1].endswith(" ") else 0
    lines = []
    for row in cells:
        last = [row[-1]]
        if left >= FOLDED_CHARS_MIN:
            last = wrap(row[-1], left, break_long_words=False, break_on_hyphens=False) or [""]
        padded = [_pad(cell, size, name) for cell, size, name in zip(row[:-1], widths, columns, strict=False)]
        lines.append(COLUMN_GAP.join([*padded, _pad(last[0], widths[-1], columns[-1])]).rstrip())
        lines += [" " * before + more for more in last[1:]]
    return [click.style(lines[0], bold=True) if sys.stdout.isatty() else lines[0], *lines[1:]]


def _pad(cell: str, width: int, column: str) -> str:
    blanks = " " * (width - cell_len(cell))
    return cell + blanks if column.endswith(" ") else blanks + cell


def human_bytes(count: float) -> str:
    """`1,536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """`90` -> `1.5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.1f} min"
    if seconds < 172_800:
        return f"{seconds / 3_600:.1f} h"
    return f"{seconds / 86_400:.1f} d"


def human_left(until_unix_ms: int, *, now_unix_ms: int) -> str:
    """How long it is until a moment: `6.9 d`, `over`; `no end` for 0 and for what lies beyond the calendar."""
    if until_unix_ms == 0 or until_unix_ms >= UNIX_MS_MAX:
        return "no end"
    left_s = (until_unix_ms - now_unix_ms) / 1e3
    return human_seconds(left_s) if left_s > 0 else "over"


def human_moment(until_unix_ms: int, *, now_unix_ms: int) -> str:
    """The same with the moment itself: `6.9 d (2026-12-07 04:00:00 UTC)`."""
    left = human_left(until_unix_ms, now_unix_ms=now_unix_ms)
    if left == "no end":
        return left
    return f"{left} ({datetime.fromtimestamp(until_unix_ms / 1e3, UTC):%Y-%m-%d %H:%M:%S} UTC)"


def human_ms(milliseconds: float) -> str:
    """`12.34` -> `12.3 ms`, `12345` -> `12.35 s`."""
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 10_000 else f"{milliseconds:.1f} ms"


def counted(count: int, noun: str) -> str:
    """`1 block`, `2,048 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def unix_ms_now() -> int:
    """This machine's wall clock."""
    return round(time.time() * 1e3)


def exit_if_incomplete(errors: Sequence[tuple[str, str]]) -> None:
    """Say which holders failed, and end with exit code 9 when there are any."""
    for holder, error in errors:
        say(f"incomplete: {holder}: {error}")
    if errors:
        raise SystemExit(EXIT_INCOMPLETE)


def read_stdin(read: Callable[[], str]) -> str:
    """What `read`, a method of sys.stdin, gives. Raises InvalidRequest for what is not text."""
    try:
        return read()
    except UnicodeDecodeError:
        raise InvalidRequest(f"standard input is not {sys.stdin.encoding} text", param="prompt") from None


def say(text: str) -> None:
    """A remark or a line of progress: stderr, so that stdout stays the result."""
    click.echo(text, err=True)
