"""How a command line names cached blocks: options that together make a Selector."""

import math
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TextIO

import click

from headrace.client import Selector
from headrace.core.block import Tier
from headrace.core.errors import InvalidRequest

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, None: 1.0}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[kK]B|[KMGT]iB|[MGT]B)?")
UNIT_BYTES = {"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)
}
HASH_LENGTHS = (16, 32)  # bytes: xxh3-128, SHA-256
UINT32_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 64) - 1  # what the messages can carry


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`30s`, `10m`, `2h`, `1d`, or plain seconds; becomes seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse, or fail with the forms that are understood."""
        if isinstance(value, float):
            return value
        found = DURATION.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is not a duration; write 30s, 10m, 2h or 1d", param, ctx)
        seconds = float(found[1]) * UNIT_SECONDS[found[2]]
        if not math.isfinite(seconds * 1e3):
            self.fail(f"{value[:20]!r}... is longer than can be said", param, ctx)
        return seconds


class Words(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Text that is not empty: an option given as "" (an unset variable of a script) must not mean "any"."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take it, or fail."""
        text = str(value)
        if not text.strip():
            self.fail("it is empty", param, ctx)
        return text


class TokenIds(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`1,2,3`; becomes a tuple of ids."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse, or fail naming what is not an id."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            self.fail(f"{value!r} is not a list of token ids; write 1,2,3", param, ctx)
        ids = tuple(int(part) for part in parts if len(part) <= len(str(UINT32_MAX)))
        if len(ids) != len(parts) or max(ids) > UINT32_MAX:
            self.fail(f"a token id is at most {UINT32_MAX}", param, ctx)
        return ids


class BlockHashText(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A block hash in hex, whole, as `cache ls` prints it."""

    name = "hash"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Parse, or fail: a shortened hash could mean other blocks than intended."""
        try:
            parsed = value if isinstance(value, bytes) else bytes.fromhex(value)
        except ValueError:
            parsed = b""
        if len(parsed) not in HASH_LENGTHS:
            self.fail(f"{value!r} is not a whole block hash in hex (32 or 64 digits)", param, ctx)
        return parsed


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`500MiB`, `2GiB`, `1GB`, or plain bytes; becomes bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse, or fail with the forms that are understood."""
        if isinstance(value, int):
            return value
        found = SIZE.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is not a size; write 500MiB, 2GiB or plain bytes", param, ctx)
        size = float(found[1]) * UNIT_BYTES[found[2] or ""]
        if size > UINT64_MAX:
            self.fail(f"{value[:20]!r} is more than can be said", param, ctx)
        return int(size)


def holder_names(nodes: tuple[str, ...], workers: tuple[str, ...]) -> tuple[str, ...]:
    """Names as listings print them: `node:ID`, `worker:ID`; the kind may be left out."""
    return (
        *(f"node:{name.removeprefix('node:')}" for name in nodes),
        *(f"worker:{name.removeprefix('worker:')}" for name in workers),
    )


def prefix_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name one prefix or blocks by hash, and narrow them; the command gets a `selector`."""
    return _with_selector(command, (*PREFIX_OPTIONS, *SCOPE_OPTIONS))


def selector_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all selecting options; the command gets them together as `selector`."""
    return _with_selector(command, (*PREFIX_OPTIONS, *SCOPE_OPTIONS, *BLOCK_OPTIONS))


PREFIX_OPTIONS = (
    click.option("--prefix", "prefix_text", type=Words(), help="The prefix as text: its last full block."),
    click.option("--prefix-file", type=click.File("r", encoding="utf-8"), help="As --prefix, from a file (-: stdin)."),
    click.option("--token-ids", "prefix_token_ids", type=TokenIds(), default=(), help="As --prefix, as token ids."),
    click.option("--hash", "block_hashes", type=BlockHashText(), multiple=True, help="A block. May be repeated."),
)
SCOPE_OPTIONS = (
    click.option("--model", type=Words(), help="Blocks of this model only."),
    click.option("--tenant", type=Words(), help="Blocks of this tenant's trust group only."),
    click.option("--namespace", type=Words(), help="Blocks of this namespace, and of those narrowed from it, only."),
    click.option("--node", "nodes", type=Words(), multiple=True, help="On this store node only. May be repeated."),
)
BLOCK_OPTIONS = (
    click.option("--worker", "workers", type=Words(), multiple=True, help="On this worker only. May be repeated."),
    click.option("--tier", type=click.Choice([tier.value for tier in Tier]), help="This tier only."),
    click.option("--idle", "idle_for_s", type=Duration(), help="Not used for this long or longer: 10m, 2h."),
    click.option("--older-than", "older_than_s", type=Duration(), help="Stored this long ago or longer: 10m, 2h."),
)


def _with_selector(command: Callable[..., Any], options: tuple[Any, ...]) -> Callable[..., Any]:
    @wraps(command)
    def with_selector(
        *args: Any,
        prefix_text: str | None,
        prefix_file: TextIO | None,
        prefix_token_ids: tuple[int, ...],
        block_hashes: tuple[bytes, ...],
        model: str | None,
        tenant: str | None,
        namespace: str | None,
        nodes: tuple[str, ...],
        workers: tuple[str, ...] = (),
        tier: str | None = None,
        idle_for_s: float | None = None,
        older_than_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        if sum((bool(prefix_text), prefix_file is not None, bool(prefix_token_ids))) > 1:
            raise click.UsageError("--prefix, --prefix-file and --token-ids name one prefix; give one of them")
        selector = Selector(
            model=model or "",
            namespace=namespace or "",
            block_hashes=block_hashes,
            prefix_text=(prefix_text or "") if prefix_file is None else read_text(prefix_file, param="prefix_file"),
            prefix_token_ids=prefix_token_ids,
            idle_for_s=idle_for_s,
            older_than_s=older_than_s,
            holders=holder_names(nodes, workers),
            tier=tier or "",
            tenant=tenant or "",
        )
        return command(*args, selector=selector, **kwargs)

    decorated: Callable[..., Any] = with_selector
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def read_text(file: TextIO, *, param: str) -> str:
    """All of a file, without the newline at its very end, which editors add and prompts do not have. Raises
    InvalidRequest for what is not UTF-8, and for nothing: an empty prefix would mean everything."""
    try:
        text = file.read().removesuffix("\n")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file.name} is not UTF-8 text", param=param) from None
    if not text:
        raise InvalidRequest(f"{file.name} is empty; nothing was done", param=param)
    return text
