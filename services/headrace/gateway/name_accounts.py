"""Whose blocks are whose: a block's namespace, or one that it was narrowed from, tells its account.

Known is what the key ring and live workers make up; a tenant that has left the file, or a model that nobody serves, is
not. Without a key ring there are no accounts to tell apart, and nothing is named.
"""

from collections.abc import Iterable, Mapping

from headrace.core.block import Namespace
from headrace.core.tenants import KeyRing
from headrace.wire.v1 import admin_pb2


def name_accounts(bases: Iterable[Namespace], key_ring: KeyRing | None) -> dict[str, str]:
    """Namespace id -> full name of the trust group that has it, for each model's namespace in `bases`."""
    groups = () if key_ring is None else key_ring.trust_groups
    return {base.narrowed("", trust_group=group).id: group for base in set(bases) for group in groups}


def account_of(block: admin_pb2.BlockEntry, namespace_to_account: Mapping[str, str]) -> str:
    """The account's name; "" where it is not known. The narrowest namespace counts: a salt's lies in its group's."""
    namespaces = (block.namespace, *block.narrowed_from)
    return next((namespace_to_account[each] for each in namespaces if each in namespace_to_account), "")
