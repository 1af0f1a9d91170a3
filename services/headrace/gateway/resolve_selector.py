"""A person's selector (model, prefix text) becomes selectors that holders understand (namespaces, token ids)."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.core.block import Namespace
from headrace.core.clock import Deadline
from headrace.core.errors import InvalidRequest, UnknownModel
from headrace.core.generation import EvictSelector
from headrace.core.members import WorkerRecord
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.tokenize_prompt import Tokenizers
from headrace.wire.client_request import TextPrompt, TokenPrompt
from headrace.wire.parse import checked_prompt_text, parse_selector, token_prompt
from headrace.wire.v1 import admin_pb2


async def resolve_selector(
    selector: admin_pb2.Selector,
    *,
    workers: Sequence[WorkerRecord],
    tokenizers: Tokenizers,
    deadline: Deadline,
    scope: AdminScope,
    unix_ms: int,
) -> tuple[EvictSelector, ...]:
    """One selector per namespace that is meant; together they mean what the person's does, cut to the caller's scope.

    A model stands for every namespace its workers have, with those narrowed from it by a trust group or a salt. A
    prefix stands for its last full block and all that follows it: exactly the blocks of sequences that start with the
    prefix's full blocks. Blocks before the last are shared with sequences that go on differently, and stay. Raises
    InvalidRequest (a prefix shorter than one block, no such namespace under that model or in that scope) and
    UnknownModel.
    """
    prefix = _prefix(selector)
    plain = admin_pb2.Selector()
    plain.CopyFrom(selector)
    plain.ClearField("prefix_text")
    plain.ClearField("prefix_token_ids")
    plain.ClearField("holders")  # whom to ask is the caller's to settle
    if plain.tenant:
        scope = scope.of_tenant(plain.tenant)
        plain.ClearField("tenant")
    if plain.HasField("older_than_s"):
        plain.created_before_unix_ms = _before(plain.older_than_s, unix_ms)
        plain.ClearField("older_than_s")
    wanted = parse_selector(plain)
    if wanted.model is None and prefix is None and scope.sees_all:
        return (wanted,)
    if prefix is not None and wanted.block_hashes:
        raise InvalidRequest("give a prefix or block hashes, not both", param="selector")
    resolved = []
    for base, meant in _serving(wanted, workers, scope).items():
        token_ids: tuple[int, ...] = ()
        if prefix is not None:
            token_ids = await _full_blocks(prefix, base, meant.model_path, tokenizers, deadline)
        # A namespace stands for those narrowed from it, so the widest ones in sight are enough.
        namespaces = (base,) if base in meant.namespaces else meant.namespaces
        resolved += [
            replace(wanted, model=None, namespace=namespace.id, prefix_token_ids=token_ids) for namespace in namespaces
        ]
    return tuple(resolved)


@dataclass(frozen=True, slots=True)
class _Meant:
    """Namespaces in sight under one model's, and where its tokenizer lies."""

    namespaces: tuple[Namespace, ...]
    model_path: str


def _before(older_than_s: float, unix_ms: int) -> int:
    if not (math.isfinite(older_than_s) and older_than_s >= 0):
        raise InvalidRequest("older_than_s must be a number of seconds, at least 0", param="older_than_s")
    return max(0, unix_ms - round(older_than_s * 1_000))


def _prefix(selector: admin_pb2.Selector) -> TextPrompt | TokenPrompt | None:
    if selector.prefix_text and selector.prefix_token_ids:
        raise InvalidRequest("give the prefix as text or as token ids, not both", param="prefix_text")
    if selector.prefix_text:
        return TextPrompt(checked_prompt_text(selector.prefix_text, param="prefix_text"))
    if selector.prefix_token_ids:
        return token_prompt(selector.prefix_token_ids, param="prefix_token_ids")
    return None


def _serving(wanted: EvictSelector, workers: Sequence[WorkerRecord], scope: AdminScope) -> dict[Namespace, _Meant]:
    """Live namespaces of the model (of every model when none is named), each with what of it the caller may see."""
    of_model = [w for w in workers if wanted.model in (None, w.model)]
    if not of_model:
        raise UnknownModel(wanted.model or "", sorted({w.model for w in workers}))
    serving = {}
    for base, model_path in {w.namespace: w.model_path for w in of_model}.items():
        in_sight = scope.namespaces(base)
        meant = tuple(n for n in in_sight if wanted.namespace in (None, base.id, n.id))
        if meant:
            serving[base] = _Meant(meant, model_path)
    if not serving:
        raise InvalidRequest(f"no live worker has namespace {wanted.namespace!r:.60}", param="namespace")
    return serving


async def _full_blocks(
    prefix: TextPrompt | TokenPrompt,
    namespace: Namespace,
    model_path: str,
    tokenizers: Tokenizers,
    deadline: Deadline,
) -> tuple[int, ...]:
    """Token ids of the prefix's full blocks."""
    if isinstance(prefix, TokenPrompt):
        token_ids = prefix.token_ids
    else:
        tokenizer = await tokenizers.get(model_path, deadline=deadline)
        token_ids = await tokenizers.run(functools.partial(tokenizer.encode, prefix), deadline=deadline)
    block_tokens = namespace.layout.block_tokens
    if len(token_ids) < block_tokens:
        raise InvalidRequest(
            f"the prefix has {len(token_ids)} tokens, less than one block of {block_tokens}: it names no block",
            param="prefix_text" if isinstance(prefix, TextPrompt) else "prefix_token_ids",
        )
    return token_ids[: len(token_ids) // block_tokens * block_tokens]
