"""Text, chat messages or token ids become token ids, off the event loop.

Owns the tokenizers of the models that live workers serve, and the few threads they run in. Loads tokenizer files only:
no model weights are read in a gateway. Knows nothing of workers beyond the directory their records name.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.clock import Deadline
from headrace.core.errors import ContextExceeded, InvalidRequest, ModelRefused
from headrace.core.front_door_limits import TOKENIZERS_START_MS
from headrace.core.limits import TOKENIZER_THREADS
from headrace.core.sequence_room import SequenceRoom
from headrace.wire.client_request import ChatPrompt, ChatTurn, Prompt, TextPrompt, TokenPrompt

log = logging.getLogger(__name__)

Result = TypeVar("Result")


async def tokenize_prompt(
    prompt: Prompt, *, model_path: str, room: SequenceRoom, tokenizers: "Tokenizers", deadline: Deadline
) -> tuple[int, ...]:
    """Token ids of a prompt as the model reads it, at least one; one token of output has room behind them.

    Text gets the special tokens that the tokenizer adds by itself; a chat goes through the model's own template and
    ends where the assistant's answer begins; token ids are taken as they are. Raises InvalidRequest (no chat template,
    unknown token id), ContextExceeded and DeadlineExceeded.
    """
    tokenizer = await tokenizers.get(model_path, deadline=deadline)
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            _check_fits(token_ids, room)  # before each of what may be a million is looked at
            _check_known(token_ids, tokenizer.vocab_size)
        case TextPrompt() | ChatPrompt():
            _check_chars(prompt, tokenizer, room.tokens_max)
            token_ids = await tokenizers.run(functools.partial(tokenizer.encode, prompt), deadline=deadline)
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    _check_fits(token_ids, room)
    return token_ids


def _check_fits(token_ids: tuple[int, ...], room: SequenceRoom) -> None:
    if not room.holds(len(token_ids) + 1):
        raise ContextExceeded(
            f"a prompt of {len(token_ids)} tokens and one of output: {room.why_not(len(token_ids) + 1)}",
            tokens_max=room.tokens_max,
            param="prompt",
        )


def _check_known(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if max(token_ids) >= vocab_size:
        raise InvalidRequest(f"token id {max(token_ids)} is unknown; ids are below {vocab_size}", param="prompt")


def _check_chars(prompt: TextPrompt | ChatPrompt, tokenizer: "PromptTokenizer", tokens_max: int) -> None:
    """Refuse what cannot fit before spending seconds on it: no token is longer than the vocabulary's longest."""
    texts = [prompt.text] if isinstance(prompt, TextPrompt) else [turn.content for turn in prompt.turns]
    characters = sum(map(len, texts))
    if characters > tokens_max * tokenizer.longest_token_chars:
        raise ContextExceeded(
            f"the prompt has {characters} characters, which no tokenisation fits into {tokens_max} tokens",
            tokens_max=tokens_max,
            param="prompt",
        )


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """One model's tokenizer. Methods block: call them in a thread."""

    tokenizer: Any  # transformers' PreTrainedTokenizerBase, which is untyped
    vocab_size: int  # rows of the model's embedding: any id below can be computed
    longest_token_chars: int

    def encode(self, prompt: TextPrompt | ChatPrompt) -> tuple[int, ...]:
        """Token ids of text or of a chat; raises InvalidRequest where the model's template refuses the messages."""
        match prompt:
            case TextPrompt(text=text):
                return tuple(self.tokenizer(text)["input_ids"])
            case ChatPrompt(turns=turns):
                text = self._apply_template([_message(turn) for turn in turns])
                return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Text of token ids, special tokens shown."""
        return str(self.tokenizer.decode(list(token_ids)))

    def _apply_template(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        if not self.tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; send a text prompt instead", param="messages")
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _message(turn: ChatTurn) -> dict[str, str]:
    """As templates read it: one that knows no names passes over them, and none is never named."""
    named = {"name": turn.name} if turn.name else {}
    return {"role": turn.role, "content": turn.content} | named


def load_tokenizer(model_path: str) -> PromptTokenizer:
    """Read a model directory's tokenizer and vocabulary size. Blocks for seconds the first time (imports).

    Raises ModelRefused when the directory is not there or not readable on this host.
    """
    # Imported here: it takes seconds and hundreds of megabytes, which nobody should pay for importing this module.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(model_path, f"its tokenizer cannot be read here: {error}") from error
    vocabulary = tokenizer.get_vocab()
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or len(tokenizer)
    return PromptTokenizer(
        tokenizer=tokenizer,
        vocab_size=int(vocab_size),
        longest_token_chars=max((len(token) for token in vocabulary), default=1),
    )


def _log_failure(loading: asyncio.Future[PromptTokenizer]) -> None:
    if not loading.cancelled() and (error := loading.exception()) is not None:
        log.warning("a tokenizer could not be loaded: %s", error)


class Tokenizers:
    """Tokenizers by model directory, each loaded once, and the threads that use them. Close it at the end."""

    def __init__(self, load: Callable[[str], PromptTokenizer] = load_tokenizer) -> None:
        self._load = load
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._loading: dict[str, asyncio.Future[PromptTokenizer]] = {}

    async def get(self, model_path: str, *, deadline: Deadline) -> PromptTokenizer:
        """The tokenizer of a directory; callers that come while it loads wait for the same load. A failed load is
        raised to all who waited and tried again by the next."""
        loading = self._loading.get(model_path)
        if loading is None or (loading.done() and (loading.cancelled() or loading.exception() is not None)):
            loading = self._start_load(model_path)
        async with deadline.scope("load the tokenizer"):
            return await asyncio.shield(loading)  # one caller's deadline must not end the load for the others

    def preload(self, model_path: str) -> None:
        """Begin to load a directory that was not asked for yet, so that its first caller need not wait."""
        if model_path not in self._loading:
            self._start_load(model_path)

    async def loaded(self, *, timeout_ms: int = TOKENIZERS_START_MS) -> None:
        """Wait for the loads under way, for so long at most. Whoever asks for one that failed is told why."""
        loading = [load for load in self._loading.values() if not load.done()]
        if loading:
            await asyncio.wait(loading, timeout=timeout_ms / 1000)

    def is_loading(self, model_path: str) -> bool:
        """Whether a load is under way; false when it failed, since the next caller is told why."""
        loading = self._loading.get(model_path)
        return loading is not None and not loading.done()

    def _start_load(self, model_path: str) -> asyncio.Future[PromptTokenizer]:
        loading = asyncio.get_running_loop().run_in_executor(self._threads, self._load, model_path)
        loading.add_done_callback(_log_failure)
        self._loading[model_path] = loading
        return loading

    async def run(self, work: Callable[[], Result], *, deadline: Deadline) -> Result:
        """Run blocking tokenizer work in one of the threads. What a cancelled caller started runs to its end there."""
        async with deadline.scope("tokenise"):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Stop the threads; queued work is dropped, running work ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
