"""`headrace generate` and `headrace models`: one request from the command line."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.prompt_options import STDIN, model_option, prompt_options, salt_option
from headrace.admin.selection import Duration
from headrace.admin.terminal import human_ms, json_option, print_json, print_table, say
from headrace.client import (
    CacheOptions,
    CacheSource,
    Done,
    GenerateResult,
    GenerateStream,
    Prompt,
    Retention,
    Sampling,
    TokenDelta,
)
from headrace.core.limits import OUTPUT_TOKENS_DEFAULT, PRIORITY_MAX
from headrace.core.retention import checked_ttl


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose tokens; the command gets them together as `sampling`."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos")

    @wraps(command)
    def with_sampling(*args: Any, **kwargs: Any) -> Any:
        return command(*args, sampling=Sampling(**{name: kwargs.pop(name) for name in names}), **kwargs)

    decorated: Callable[..., Any] = with_sampling
    for option in (
        click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token."),
        click.option("--stop", multiple=True, help="Stop before this text. May be given more than once."),
        click.option("--seed", type=int, default=None, help="Seed of the draw."),
        click.option("--top-p", type=float, default=None, help="Draw from the smallest set with this probability."),
        click.option("--top-k", type=int, default=None, help="Draw from the k most probable tokens."),
        click.option("--temperature", type=float, default=None, help="0 (the default) is greedy."),
        click.option(
            "--max-tokens",
            type=int,
            default=None,
            help=f"Tokens to generate at most. Default: {OUTPUT_TOKENS_DEFAULT:,}.",
        ),
    ):
        decorated = option(decorated)
    return decorated


def retention_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how long a request's blocks may stay; the command gets them together as `retention`."""

    @wraps(command)
    def with_retention(*args: Any, ttl_s: float | None, not_on_disk: bool, **kwargs: Any) -> Any:
        checked_s = None if ttl_s is None else checked_ttl(ttl_s, param="--ttl")
        return command(*args, retention=Retention(ttl_s=checked_s, on_disk=not not_on_disk), **kwargs)

    decorated: Callable[..., Any] = with_retention
    for option in (
        click.option("--not-on-disk", is_flag=True, help="Have no copy of its blocks written to a disk tier."),
        click.option(
            "--ttl", "ttl_s", type=Duration(), help="Its blocks go when unused for so long: 5m, 7d. Default: no bound."
        ),
    ):
        decorated = option(decorated)
    return decorated


def cache_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what may be reused and what is left; the command gets them together as `cache`."""

    @wraps(command)
    def with_cache(
        *args: Any,
        source: tuple[str, ...],
        bypass: bool,
        no_publish: bool,
        decode_worker: str,
        prefill_worker: str,
        affinity_key: str,
        retention: Retention,
        **kwargs: Any,
    ) -> Any:
        if bypass and source:
            raise click.UsageError("--bypass and --source contradict each other; leave one out")
        every = frozenset(CacheSource)
        sources = frozenset() if bypass else frozenset(CacheSource(name) for name in source) or every
        cache = CacheOptions(
            sources=sources,
            publish=not no_publish,
            retention=retention,
            affinity_key=affinity_key,
            decode_worker=decode_worker,
            prefill_worker=prefill_worker,
        )
        return command(*args, cache=cache, **kwargs)

    decorated: Callable[..., Any] = with_cache
    for option in (
        click.option("--prefill-worker", default="", help="Prefill on this worker (see `headrace status`)."),
        click.option("--decode-worker", default="", help="Decode on this worker (see `headrace status`)."),
        click.option("--affinity-key", default="", help="Requests of one key meet on one of equal workers."),
        retention_options,
        click.option("--no-publish", is_flag=True, help="Leave nothing in the cache."),
        click.option("--bypass", is_flag=True, help="Compute the whole prompt, whatever is cached."),
        click.option(
            "--source", type=click.Choice([s.value for s in CacheSource]), multiple=True, help="Reuse from here only."
        ),
    ):
        decorated = option(decorated)
    return decorated


def priority_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--priority`, which a tenant may bound (docs/load.md)."""
    return click.option(
        "--priority",
        type=click.IntRange(-PRIORITY_MAX, PRIORITY_MAX),
        default=None,
        help="Higher ones are computed first. Default: the tenant's, else 0.",
    )(command)


@click.command(short_help="Send one prompt and stream the answer.")
@prompt_options(default=STDIN)
@model_option
@salt_option
@priority_option
@click.option("--timeout", "timeout_s", type=Duration(), default=None, help="Deadline: 30s, 2m. Default: the server's.")
@sampling_options
@cache_options
@address_option
@json_option
def generate(*, prompt: Prompt, address: str, as_json: bool, **request: Any) -> None:
    """Continue PROMPT, or what comes on standard input, and stream the answer. A last newline does not count.

    The answer goes to standard output; token counts, cached tokens by source, times and the request's id (for
    `headrace explain` and `headrace cache why-miss --request`) go to standard error.

    \b
    Examples:
      headrace generate "The headrace carries" --max-tokens 32
      headrace generate --system "Be brief." "What is a headrace?"
      headrace generate --ttl 10m --not-on-disk < confidential.txt
    """
    with connect(address) as client, client.stream(prompt, **request) as stream:
        if not as_json:
            print_text(stream)
        result = stream.result()
    if as_json:
        print_json(result_json(result))
    else:
        say(f"[{describe_result(result)}; request {result.request_id}]")


def print_text(stream: GenerateStream) -> str:
    """Print the text as it comes and return it whole; the stream's own `result()` still knows everything."""
    parts: list[str] = []
    try:
        for event in stream:
            if isinstance(event, TokenDelta | Done):
                click.echo(event.text, nl=False)
                parts.append(event.text)
    finally:
        if parts:  # an error in the middle is said on a line of its own
            click.echo()
    return "".join(parts)


def result_json(result: GenerateResult) -> dict[str, Any]:
    """A result for scripts: as GenerateResult, with cached tokens by source and in total."""
    cached = result.usage.cached
    return {
        "request_id": result.request_id,
        "model": result.model,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "cached_tokens": {**{str(s): n for s, n in cached.by_source().items()}, "total": cached.total},
            "drafted_tokens": result.usage.drafted_tokens,
            "accepted_draft_tokens": result.usage.accepted_draft_tokens,
        },
        "ttft_ms": round(result.ttft_ms, 3),
        "total_ms": round(result.total_ms, 3),
        "decode_worker": result.decode_worker,
        "prefill_worker": result.prefill_worker,
    }


def describe_result(result: GenerateResult) -> str:
    """`prompt 3,120 tokens, cached 3,072 (shared_memory 3,072), first token 41.0 ms, 48 tokens at 21.0/s`."""
    usage = result.usage
    sources = [f"{source} {count:,}" for source, count in usage.cached.by_source().items() if count]
    cached = f"cached {usage.cached.total:,}" + (f" ({', '.join(sources)})" if sources else "")
    further_s = (result.total_ms - result.ttft_ms) / 1e3
    speed = (
        f" at {(usage.completion_tokens - 1) / further_s:.1f}/s" if usage.completion_tokens > 1 and further_s else ""
    )
    drafts = f", {usage.accepted_draft_tokens:,} of {usage.drafted_tokens:,} drafted ones kept"
    return (
        f"prompt {usage.prompt_tokens:,} tokens, {cached}, first token {human_ms(result.ttft_ms)}, "
        f"{usage.completion_tokens:,} tokens{speed}{drafts if usage.drafted_tokens else ''}"
    )


@click.command(short_help="List the models that are served.")
@address_option
@json_option
def models(*, address: str, as_json: bool) -> None:
    """List the models that are served, with their context, block size and namespace.

    \b
    Example:
      headrace models
    """
    with connect(address) as client:
        served: Sequence[Any] = client.list_models()
    if as_json:
        print_json({"models": served})
        return
    rows = [[m.id, f"{m.context_tokens_max:,} tokens", f"{m.block_tokens} tokens", m.namespace] for m in served]
    print_table(["model ", "context", "block", "namespace "], rows)
