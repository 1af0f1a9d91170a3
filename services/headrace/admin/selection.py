"""How a command line names cached blocks: options that together make a Selector."""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from headrace.client import Selector
from headrace.core.block import Tier

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, None: 1.0}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[kK]B|[KMGT]iB|[MGT]B)?")
UNIT_BYTES = {"": 1, "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)
}
HASH_LENGTHS = (16, 32)  # bytes: xxh3-128, SHA-256


class Duration(click.ParamType):
    """`30s`, `10m`, `2h`, `1d`, or plain seconds; becomes seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse, or fail with the forms that are understood."""
        if isinstance(value, float):
            return value
        found = DURATION.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is not a duration; write 30s, 10m, 2h or 1d", param, ctx)
        return float(found[1]) * UNIT_SECONDS[found[2]]


class TokenIds(click.ParamType):
    """`1,2,3`; becomes a tuple of ids."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse, or fail naming what is not an id."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            self.fail(f"{value!r} is not a list of token ids; write 1,2,3", param, ctx)
        return tuple(int(part) for part in parts)


class BlockHashText(click.ParamType):
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


class Size(click.ParamType):
    """`500MiB`, `2GiB`, `1GB`, or plain bytes; becomes bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse, or fail with the forms that are understood."""
        if isinstance(value, int):
            return value
        found = SIZE.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is not a size; write 500MiB, 2GiB or plain bytes", param, ctx)
        return int(float(found[1]) * UNIT_BYTES[found[2] or ""])


def holder_names(nodes: tuple[str, ...], workers: tuple[str, ...]) -> tuple[str, ...]:
    """Names as listings print them: `node:ID`, `worker:ID`; the kind may be left out."""
    return (
        *(f"node:{name.removeprefix('node:')}" for name in nodes),
        *(f"worker:{name.removeprefix('worker:')}" for name in workers),
    )


def selector_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the selecting options; the command gets them together as `selector`."""

    @wraps(command)
    def with_selector(
        *args: Any,
        model: str,
        namespace: str,
        block_hashes: tuple[bytes, ...],
        prefix_text: str,
        prefix_token_ids: tuple[int, ...],
        idle_for_s: float | None,
        older_than_s: float | None,
        nodes: tuple[str, ...],
        workers: tuple[str, ...],
        tier: str | None,
        tenant: str,
        **kwargs: Any,
    ) -> Any:
        selector = Selector(
            model=model,
            namespace=namespace,
            block_hashes=block_hashes,
            prefix_text=prefix_text,
            prefix_token_ids=prefix_token_ids,
            idle_for_s=idle_for_s,
            older_than_s=older_than_s,
            holders=holder_names(nodes, workers),
            tier=tier or "",
            tenant=tenant,
        )
        return command(*args, selector=selector, **kwargs)

    decorated: Callable[..., Any] = with_selector
    for option in (
        click.option("--tier", type=click.Choice([tier.value for tier in Tier]), help="This tier only."),
        click.option("--worker", "workers", multiple=True, help="On this worker only (its own pool). May be repeated."),
        click.option("--node", "nodes", multiple=True, help="On this store node only. May be repeated."),
        click.option("--older-than", "older_than_s", type=Duration(), help="Stored this long ago or longer: 10m, 2h."),
        click.option("--idle", "idle_for_s", type=Duration(), help="Not used for this long or longer: 10m, 2h."),
        click.option("--namespace", default="", help="Blocks of this namespace, and of those narrowed from it, only."),
        click.option("--tenant", default="", help="Blocks of this tenant's trust group only."),
        click.option("--model", default="", help="Blocks of this model only."),
        click.option(
            "--hash", "block_hashes", type=BlockHashText(), multiple=True, help="A block and what follows it."
        ),
        click.option("--token-ids", "prefix_token_ids", type=TokenIds(), default=(), help="As --prefix, as token ids."),
        click.option("--prefix", "prefix_text", default="", help="Blocks of prompts that begin with this text."),
    ):
        decorated = option(decorated)
    return decorated
