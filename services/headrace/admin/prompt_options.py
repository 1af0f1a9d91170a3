"""What requests and questions about prompts have in common on a command line: the prompt itself (text, from a file or
standard input, token ids, or a user's message), the model, the salt."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TextIO

import click

from headrace.admin.selection import TokenIds, read_text
from headrace.admin.terminal import say
from headrace.client import Message, Prompt, ServedModel
from headrace.core.errors import InvalidRequest, UnknownModel

STDIN = "-"


def prompt_options(*, default: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the argument PROMPT and what may stand for it; the command gets `prompt`.

    default: what PROMPT is where nothing is given; `STDIN` reads it, None leaves `prompt` None."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_prompt(
            *args: Any,
            prompt: str | None,
            file: TextIO | None,
            token_ids: tuple[int, ...] | None,
            as_chat: bool,
            system: str,
            **kwargs: Any,
        ) -> Any:
            if sum(value is not None for value in (prompt, file, token_ids)) > 1:
                raise click.UsageError("PROMPT, --file and --token-ids are each a whole prompt; give one of them")
            if token_ids is not None and (as_chat or system):
                raise click.UsageError("--token-ids is a whole prompt; leave --chat and --system out")
            asked: Prompt | None = token_ids
            if token_ids is None:
                given = default if prompt is None else prompt
                text = read_text(file, param="file") if file is not None else _text(given)
                asked = _chat(text, system) if text is not None and (as_chat or system) else text
            return command(*args, prompt=asked, **kwargs)

        decorated: Callable[..., Any] = with_prompt
        for option in reversed(OPTIONS):
            decorated = option(decorated)
        return decorated

    return add


OPTIONS: tuple[Any, ...] = (
    click.argument("prompt", required=False),
    click.option("--file", type=click.File("r", encoding="utf-8"), help="Read PROMPT from a file (-: standard input)."),
    click.option("--token-ids", type=TokenIds(), default=None, help="The prompt as token ids: 1,2,3."),
    click.option("--chat", "as_chat", is_flag=True, help="PROMPT is a user's message, in the model's chat format."),
    click.option("--system", default="", help="System message before it; implies --chat."),
)


def model_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--model`, which is "" where the only one that is served is meant."""
    return click.option("--model", default="", help="Needed only when more than one is served.")(command)


def find_model(name: str, served: Sequence[ServedModel]) -> ServedModel:
    """What `--model` means. Raises UnknownModel, or InvalidRequest where it was left out and is needed: which models
    there are is the server's state, and no fault of the command line's form."""
    if not name and len(served) > 1:
        ids = ", ".join(model.id for model in served)
        raise InvalidRequest(f"several models are served; say --model: {ids}", param="model")
    for model in served:
        if name in ("", model.id):
            return model
    raise UnknownModel(name, [model.id for model in served])


def salt_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--cache-salt`, under the name that it has in the OpenAI API too."""
    return click.option("--cache-salt", default="", help="Share blocks only with requests of the same salt.")(command)


def _text(given: str | None) -> str | None:
    """PROMPT as it was given, or what standard input has for it."""
    if given != STDIN:
        return given
    if sys.stdin.isatty():
        say("type the prompt, and Ctrl-D at the end of it")
    return read_text(sys.stdin, param="prompt")


def _chat(text: str, system: str) -> Prompt:
    return [*([Message("system", system)] if system else []), Message("user", text)]
