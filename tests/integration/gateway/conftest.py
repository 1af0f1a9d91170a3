"""A model directory with a tokenizer and no weights."""

import pytest
from tiny_gateway import write_tokenizer


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the directory, as worker records name it."""
    return write_tokenizer(tmp_path_factory.mktemp("tiny-model"))
