"""A complete model directory of about 300 kB, made in a second: a random-weight llama and a byte-level tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEXT = "The headrace carries water from the reservoir to the turbines, and the tailrace carries it away again."


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    text: str = TEXT,
    vocab_size: int = 300,
    context_tokens_max: int = 4_096,
    hidden_size: int = 64,
    num_layers: int = 2,
) -> Path:
    """Write config, weights, tokenizer and chat template; greedy text is gibberish, the same every time.

    The tokenizer is trained on `text`: a larger vocabulary makes fewer tokens of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens_max,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
