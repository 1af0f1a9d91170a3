"""`headrace chat`: a conversation on the terminal that shows after each turn what the cache saved."""

import sys
from typing import Any, Unpack

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.inference_commands import (
    cache_options,
    describe_result,
    print_text,
    priority_option,
    result_json,
    sampling_options,
)
from headrace.admin.prompt_options import find_model, model_option, salt_option
from headrace.admin.terminal import json_lines_option, print_json_line, read_stdin, say, tell_error
from headrace.client import HeadraceClient, Message, RequestOptions
from headrace.core.errors import HeadraceError


@click.command()
@click.option("--system", default="", help="System message at the start of the conversation.")
@model_option
@salt_option
@priority_option
@sampling_options
@cache_options
@address_option
@json_lines_option
def chat(*, system: str, model: str, address: str, as_json: bool, **request: Any) -> None:
    """Talk to a model. /reset forgets the conversation, /exit (or end of input) ends it, Ctrl-C stops an answer.

    After each turn: prompt tokens, cached tokens by source, time to first token. The history is sent again each turn,
    so a growing share of the prompt comes from the cache.

    \b
    Examples:
      headrace chat --system "Be brief."
      headrace chat --ttl 1h --affinity-key "$USER"
    """
    with connect(address) as client:
        conversation = Conversation(client, system=system, model=model, as_json=as_json, **request)
        say(f"{conversation.model} at {address}. /reset forgets, /exit ends.")
        while (line := _read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                conversation.reset()
                say("forgotten")
            elif line.startswith("/"):
                say(f"unknown command {line}; there are /reset and /exit")
            elif line:
                conversation.ask(line)


def _read_line() -> str | None:
    """The next line without blanks around it; None at the end of input. A person gets a prompt, line editing and
    history."""
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            return None
    # Not click's stream: it is made anew at each call, and the old one keeps what it had read ahead.
    line = read_stdin(sys.stdin.readline)
    return line.strip() if line else None


class Conversation:
    """The turns so far. A turn that failed or was stopped is not kept: the next one starts from what was whole."""

    def __init__(
        self, client: HeadraceClient, *, system: str, as_json: bool, **options: Unpack[RequestOptions]
    ) -> None:
        """Ask the server for its models first, so that a wrong address or name is told before anybody types."""
        self.model = find_model(options.get("model", ""), client.list_models()).id
        self._client = client
        self._options: RequestOptions = {**options, "model": self.model}
        self._start = [Message("system", system)] if system else []
        self._turns = list(self._start)
        self._as_json = as_json

    def reset(self) -> None:
        """Forget all turns but the system message."""
        self._turns = list(self._start)

    def ask(self, text: str) -> None:
        """Send one turn, stream the answer, print what it cost."""
        turns = [*self._turns, Message("user", text)]
        try:
            answer = self._stream(turns)
        except HeadraceError as error:
            tell_error(error, as_json=self._as_json)
            return
        except KeyboardInterrupt:
            say("\nstopped; this turn is not kept")
            return
        self._turns = [*turns, Message("assistant", answer)]

    def _stream(self, turns: list[Message]) -> str:
        with self._client.stream(turns, **self._options) as stream:
            if not self._as_json:
                print_text(stream)
            result = stream.result()
        if self._as_json:
            print_json_line(result_json(result))
        else:
            say(f"[{describe_result(result)}]")
        return result.text
