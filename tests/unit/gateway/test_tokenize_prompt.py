"""Prompts become the token ids that the model's own tokenizer gives."""

import asyncio
import threading
from contextlib import closing

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from headrace.core.clock import Deadline, SystemClock
from headrace.core.errors import DeadlineExceeded, InvalidRequest, ModelRefused
from headrace.core.sequence_room import SequenceRoom
from headrace.gateway.tokenize_prompt import PromptTokenizer, Tokenizers, load_tokenizer, tokenize_prompt
from headrace.wire.client_request import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt


def soon() -> Deadline:
    """One that a busy machine does not miss."""
    return Deadline.after(120, SystemClock())


@pytest.fixture
def tokenizers():
    tokenizers = Tokenizers()
    yield tokenizers
    tokenizers.close()


def tokenize(prompt, model_path, tokenizers, tokens_max=1_000):
    room = SequenceRoom(tokens_max, block_tokens=16, pool_blocks=100)
    return tokenize_prompt(prompt, model_path=model_path, room=room, tokenizers=tokenizers, deadline=soon())


async def test_text_and_chat_give_the_ids_of_transformers_itself(model_path, tokenizers):
    """Fails when special tokens are added twice or a template is applied otherwise than by the library."""
    reference = AutoTokenizer.from_pretrained(model_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界 🌍"}]
    chat = ChatPrompt(tuple(ChatTurn(m["role"], m["content"]) for m in messages))
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert await tokenize(chat, model_path, tokenizers) == tuple(expected)
    assert await tokenize(TextPrompt("Grüße"), model_path, tokenizers) == tuple(reference("Grüße")["input_ids"])
    assert await tokenize(TokenPrompt((5, 6)), model_path, tokenizers) == (5, 6)


async def test_a_template_that_knows_names_gets_them(model_path):
    """Fails when two users of one chat become one for a model that could tell them apart."""

    def load(path: str) -> PromptTokenizer:
        loaded = load_tokenizer(path)
        loaded.tokenizer.chat_template = "{% for m in messages %}{{ m.name if m.name is defined else '-' }}{% endfor %}"
        return loaded

    chat = ChatPrompt((ChatTurn("user", "hi", name="ann"), ChatTurn("user", "hi")))
    with closing(Tokenizers(load)) as tokenizers:
        expected = await tokenize(TextPrompt("ann-"), model_path, tokenizers)
        assert await tokenize(chat, model_path, tokenizers) == expected


async def test_special_tokens_are_added_to_text_and_not_to_a_chat(model_path, tmp_path, tokenizers):
    """Fails when a chat, whose template spells its own, gets a second begin-of-sequence token, or text gets none."""
    begins = AutoTokenizer.from_pretrained(model_path)
    begins.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    begins.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 257}')
    assert (await tokenize(TextPrompt("a"), str(tmp_path), tokenizers))[0] == 0
    chat = ChatPrompt((ChatTurn("user", "a"),))
    assert await tokenize(chat, str(tmp_path), tokenizers) == await tokenize(chat, model_path, tokenizers)


async def test_messages_that_the_template_refuses_are_the_callers_fault(model_path, tokenizers):
    """Fails when a template's refusal looks like a fault of the server."""
    turns = (ChatTurn("user", "hi"), ChatTurn("system", "too late"))
    with pytest.raises(InvalidRequest, match="system comes first") as raised:
        await tokenize(ChatPrompt(turns), model_path, tokenizers)
    assert raised.value.param == "messages"


async def test_a_model_without_a_template_says_so(model_path):
    """Fails when a base model's chat is some made-up format."""

    def load(path: str) -> PromptTokenizer:
        loaded = load_tokenizer(path)
        loaded.tokenizer.chat_template = None
        return loaded

    with closing(Tokenizers(load)) as tokenizers, pytest.raises(InvalidRequest, match="no chat template"):
        await tokenize(ChatPrompt((ChatTurn("user", "hi"),)), model_path, tokenizers)


async def test_a_directory_that_cannot_be_read_is_named_and_tried_again(tmp_path, model_path, tokenizers):
    """Fails when one failed load is remembered for ever, or ends as an internal error."""
    missing = tmp_path / "model"
    with pytest.raises(ModelRefused, match="cannot be read"):
        await tokenize(TextPrompt("x"), str(missing), tokenizers)
    missing.symlink_to(model_path)
    assert await tokenize(TextPrompt("x"), str(missing), tokenizers)


async def test_the_event_loop_goes_on_while_a_tokenizer_works(model_path, tokenizers):
    """Fails when tokenising runs on the loop."""
    release = threading.Event()
    working = asyncio.create_task(tokenizers.run(lambda: release.wait(120), deadline=soon()))
    for _ in range(3):
        await asyncio.sleep(0.01)
    assert not working.done()
    release.set()
    assert await working


async def test_waiting_for_a_tokenizer_ends_at_the_deadline_and_spares_the_others(model_path):
    """Fails when a slow load has no bound, or one impatient caller ends it for all."""
    release = threading.Event()

    def load_slowly(path: str) -> PromptTokenizer:
        release.wait(120)
        return load_tokenizer(path)

    with closing(Tokenizers(load_slowly)) as tokenizers:
        patient = asyncio.create_task(tokenizers.get(model_path, deadline=soon()))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded):
            await tokenizers.get(model_path, deadline=Deadline.after(0.05, SystemClock()))
        release.set()
        assert (await patient).vocab_size == 257


async def test_a_start_waits_for_tokenizers_that_are_being_read_and_not_for_ever():
    """Fails when a new gateway takes calls that it keeps waiting while another one could answer them."""
    read = threading.Event()

    def load(model_path: str) -> PromptTokenizer:
        assert read.wait(60)
        return PromptTokenizer(tokenizer=None, vocab_size=1, longest_token_chars=1)

    tokenizers = Tokenizers(load)
    try:
        tokenizers.preload("a model")
        await tokenizers.loaded(timeout_ms=1)
        assert tokenizers.is_loading("a model")
        start = asyncio.create_task(tokenizers.loaded())
        await asyncio.sleep(0)
        assert not start.done()
        read.set()
        await start
        assert not tokenizers.is_loading("a model")
        await tokenizers.loaded()
    finally:
        tokenizers.close()
