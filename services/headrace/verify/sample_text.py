"""Text that is always there: what this library's own files say. Code and prose, more than any check needs."""

import ast
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from tokenizers import Tokenizer

import headrace


def code_tokens(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the core's source."""
    return _encode(tokenizer, "\n".join(path.read_text(encoding="utf-8") for path in _files("core")))


def prose_tokens(tokenizer: Tokenizer) -> list[int]:
    """Token ids of every docstring of the library: English sentences about one subject."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = []
    for path in _files("."):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
                prose.append(docstring)
    return _encode(tokenizer, "\n\n".join(prose))


def cut(token_ids: Sequence[int], offset: int, num_tokens: int) -> list[int]:
    """So many tokens of a text from some token on; it begins again where it ends."""
    return list(islice(cycle(token_ids), offset, offset + num_tokens))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _files(folder: str) -> list[Path]:
    """Of the library, without what is generated."""
    paths = (Path(headrace.__file__).parent / folder).rglob("*.py")
    return sorted(path for path in paths if path.parent.name != "v1")
