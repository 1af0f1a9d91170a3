"""`headrace cache warm`: compute prompts ahead of the users who will send them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.inference_commands import retention_options
from headrace.admin.prompt_options import model_option, salt_option
from headrace.admin.selection import read_text
from headrace.admin.terminal import EXIT_INCOMPLETE, counted, json_option, print_json, say
from headrace.client import CacheOptions, Message, Prompt, Retention, Sampling
from headrace.core.errors import InvalidRequest


@click.command("warm", short_help="Compute prompts ahead of their users.")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@model_option
@salt_option
@retention_options
@address_option
@json_option
def warm_cache(*, file: TextIO, model: str, cache_salt: str, retention: Retention, address: str, as_json: bool) -> None:
    """Put prompts into the cache: one in each line of FILE (- for standard input).

    A line is text, or JSON: a list of token ids, {"token_ids": [...]}, {"text": "..."} or {"messages": [...]}. Each
    is sent as a request for one token, so it is computed and stored as any request's prompt would be. A line that
    fails is said and does not stop the others; then the exit code is 9.

    \b
    Examples:
      headrace cache warm prompts.txt
      headrace cache warm documents.txt --ttl 1h --not-on-disk
      jq -c .messages chats.jsonl | headrace cache warm -
    """
    prompts = list(read_prompts(read_text(file, param="file"), name=file.name))
    if not prompts:
        raise InvalidRequest("the file has no prompts; nothing was sent", param="file")
    cache = CacheOptions(retention=retention)
    warmed: list[dict[str, Any]] = []
    with connect(address) as client:
        for number, (line, prompt) in enumerate(prompts, start=1):
            row: dict[str, Any] = {"line": line}
            try:
                result = client.generate(
                    prompt, model=model, sampling=Sampling(max_tokens=1), cache=cache, cache_salt=cache_salt
                )
                row |= {"tokens": result.usage.prompt_tokens, "cached_tokens": result.usage.cached.total}
                row["ms"] = round(result.total_ms, 1)
                told = f"{row['tokens']:,} tokens, {row['cached_tokens']:,} were there, {row['ms'] / 1e3:.2f} s"
            except InvalidRequest as error:
                row["error"] = told = str(error)
            warmed.append(row)
            say(f"[{number}/{len(prompts)}] line {line}: {told}")
    failed = [row for row in warmed if "error" in row]
    total = sum(row.get("tokens", 0) for row in warmed)
    cached = sum(row.get("cached_tokens", 0) for row in warmed)
    if as_json:
        print_json({"prompts": warmed, "tokens": total, "cached_tokens": cached, "failed": len(failed)})
    else:
        told = counted(len(warmed) - len(failed), "prompt")
        click.echo(f"{told}, {counted(total, 'token')}, {cached:,} of them were there before")
    if failed:
        raise SystemExit(EXIT_INCOMPLETE)


def read_prompts(content: str, *, name: str) -> Iterator[tuple[int, Prompt]]:
    """Line numbers and prompts; empty lines are skipped. Raises InvalidRequest naming the line that cannot be read."""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        if line.lstrip()[0] not in "[{":
            yield number, line
            continue
        try:
            yield number, _prompt_of(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidRequest(f"{Path(name).name}, line {number}: {why}; nothing was sent", param="file") from error


def _prompt_of(value: Any) -> Prompt:
    if isinstance(value, dict):
        if "messages" in value:
            value = value["messages"]
        elif "token_ids" in value:
            value = value["token_ids"]
        else:
            value = value["text"]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(part) is int for part in value):
        return tuple(value)
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return [Message(str(part["role"]), str(part["content"])) for part in value]
    raise ValueError("neither text, token ids nor messages")
