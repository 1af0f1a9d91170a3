"""One attacked system for all attacks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory with a tokenizer and no weights."""
    from tiny_gateway import write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("tiny-model"))
