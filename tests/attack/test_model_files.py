"""A model directory from somebody else: it decides what is answered, and runs no code here."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
from tiny_gateway import write_tokenizer
from transformers import AutoTokenizer, LlamaConfig

from headrace.core.errors import InvalidRequest
from headrace.engine.load_weights import load_weights
from headrace.gateway.tokenize_prompt import PromptTokenizer
from headrace.wire.client_request import ChatPrompt, ChatTurn


class Runs:
    """As a pickle: whoever loads it makes a directory."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    ).save_pretrained(directory)
    return directory


def test_weights_that_are_a_pickle_with_code_are_refused_and_not_run(directory: Path, tmp_path: Path):
    """Fails when a checkpoint in torch's old format is unpickled as it is."""
    made, evil = tmp_path / "made", pickle.dumps(Runs(tmp_path / "made"))
    pickle.loads(evil)
    made.rmdir()  # so it would have run
    with zipfile.ZipFile(directory / "pytorch_model.bin", "w") as weights:
        for name, content in (("data.pkl", evil), ("version", b"3\n"), ("byteorder", b"little")):
            weights.writestr(f"pytorch_model/{name}", content)
    with pytest.raises(Exception, match=r"(?i)weights.?only|unsupported|unpickl"):
        load_weights(directory)
    assert not made.exists()


def test_code_that_comes_with_a_checkpoint_is_not_run(directory: Path, tmp_path: Path):
    """Fails when a model's own classes are loaded as its configuration asks."""
    made = tmp_path / "made"
    (directory / "modeling_evil.py").write_text(
        f"import os\nos.mkdir({str(made)!r})\nclass Evil: pass\nEvilConfig = Evil\n"
    )
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_weights(directory)
    assert not made.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_chat_template_gets_out_of_its_sandbox_by_no_attribute(tmp_path: Path, template: str):
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    tokenizer.chat_template = template
    told = PromptTokenizer(tokenizer=tokenizer, vocab_size=300, longest_token_chars=1)
    with pytest.raises(InvalidRequest, match="chat template"):
        told.encode(ChatPrompt(turns=(ChatTurn(role="user", content="x"),)))
