"""A person's selector (model, prefix text) becomes selectors that holders understand (namespaces, block hashes)."""

import functools
from collections.abc import Sequence

from headrace.core.block import Namespace
from headrace.core.clock import Deadline
from headrace.core.errors import InvalidRequest, UnknownModel
from headrace.core.generation import EvictSelector
from headrace.core.members import WorkerRecord
from headrace.gateway.service import hash_for
from headrace.gateway.tokenize_prompt import Tokenizers
from headrace.wire.client_request import TextPrompt, TokenPrompt
from headrace.wire.parse import checked_prompt_text, parse_selector, token_prompt
from headrace.wire.v1 import admin_pb2


async def resolve_selector(
    selector: admin_pb2.Selector, *, workers: Sequence[WorkerRecord], tokenizers: Tokenizers, deadline: Deadline
) -> tuple[EvictSelector, ...]:
    """One selector per namespace that is meant; together they mean what the person's does.

    A model stands for every namespace its workers have. A prefix stands for its last full block and all that follows
    it: exactly the blocks of sequences that start with the prefix's full blocks. Blocks before the last are shared with
    sequences that go on differently, and stay. Raises InvalidRequest (a prefix shorter than one block, no such
    namespace under that model) and UnknownModel.
    """
    prefix = _prefix(selector)
    plain = admin_pb2.Selector()
    plain.CopyFrom(selector)
    plain.ClearField("prefix_text")
    plain.ClearField("prefix_token_ids")
    wanted = parse_selector(plain)
    if wanted.model is None and prefix is None:
        return (wanted,)
    if prefix is not None and wanted.block_hashes:
        raise InvalidRequest("give a prefix or block hashes, not both", param="selector")
    serving = _serving(wanted, workers)
    resolved = []
    for namespace, model_path in serving.items():
        block_hashes = wanted.block_hashes
        if prefix is not None:
            block_hashes = await _last_block(prefix, namespace, model_path, tokenizers, deadline)
        resolved.append(EvictSelector(namespace=namespace.id, block_hashes=block_hashes, idle_for_s=wanted.idle_for_s))
    return tuple(resolved)


def _prefix(selector: admin_pb2.Selector) -> TextPrompt | TokenPrompt | None:
    if selector.prefix_text and selector.prefix_token_ids:
        raise InvalidRequest("give the prefix as text or as token ids, not both", param="prefix_text")
    if selector.prefix_text:
        return TextPrompt(checked_prompt_text(selector.prefix_text, param="prefix_text"))
    if selector.prefix_token_ids:
        return token_prompt(selector.prefix_token_ids, param="prefix_token_ids")
    return None


def _serving(wanted: EvictSelector, workers: Sequence[WorkerRecord]) -> dict[Namespace, str]:
    """Live namespaces of the model (of every model when none is named) and where their tokenizer lies."""
    of_model = [w for w in workers if wanted.model in (None, w.model)]
    if not of_model:
        raise UnknownModel(wanted.model or "", sorted({w.model for w in workers}))
    serving = {w.namespace: w.model_path for w in of_model if wanted.namespace in (None, w.namespace.id)}
    if not serving:
        raise InvalidRequest(f"no live worker has namespace {wanted.namespace!r:.60}", param="namespace")
    return serving


async def _last_block(
    prefix: TextPrompt | TokenPrompt,
    namespace: Namespace,
    model_path: str,
    tokenizers: Tokenizers,
    deadline: Deadline,
) -> tuple[bytes, ...]:
    """Hash of the prefix's last full block."""
    if isinstance(prefix, TokenPrompt):
        token_ids = prefix.token_ids
    else:
        tokenizer = await tokenizers.get(model_path, deadline=deadline)
        token_ids = await tokenizers.run(functools.partial(tokenizer.encode, prefix), deadline=deadline)
    chain = hash_for(namespace, token_ids).chain
    if not chain:
        raise InvalidRequest(
            f"the prefix has {len(token_ids)} tokens, less than one block of {namespace.layout.block_tokens}: it names"
            " no block",
            param="prefix_text" if isinstance(prefix, TextPrompt) else "prefix_token_ids",
        )
    return (chain[-1],)
