"""How the index is laid out in Redis. No other file spells a key or a value's form.

    hr1:{<namespace>}:b:<block hash, raw bytes>   hash     holder id -> "<incarnation>:<tier>"
    hr1:{<namespace>}:e:<holder id>               stream   the holder's changes, capped; see below
    hr1:{members}:ids                             set      holder ids that were ever announced
    hr1:{members}:m:<holder id>                   string   "<incarnation>:<record in msgpack>", with a TTL
    hr1:{members}:p:<reader>                      string   empty, with a TTL: a reader's mark, see `redis_membership`

`hr1` is the version of all of this: another layout takes another prefix, so that what does not parse under this one is
junk and may be dropped. The braces are Redis Cluster's hash tag: whatever one script touches lies in one slot. Scripts
get a key *prefix* and append block hashes to it, since 8,192 keys in one call would cost more than the lookup.

`<incarnation>` is 20 decimal digits, so that Lua compares it as text: its numbers are doubles and exact only to 2^53.

An event's id is `<incarnation>-<sequence>`, and Redis counts the sequence up from 0 without a gap. A mirror that misses
a number, or sees the newest id fall behind its own, reads that holder's inventory again. Fields: `op` "+" or "-",
`tier` (on "+"), `blocks` (hashes, packed).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.block import BlockHash, HolderId, NamespaceId, Tier

_PREFIX = b"hr1:"
_BLOCK = b"}:b:"
_EVENTS = b"}:e:"
_HASH_BYTES = (16, 32)

ALL_KEYS_PATTERN = _PREFIX + b"*"
MEMBER_IDS_KEY = _PREFIX + b"{members}:ids"
MEMBER_KEY_PREFIX = _PREFIX + b"{members}:m:"
_MARK_KEY_PREFIX = _PREFIX + b"{members}:p:"

INCARNATION_DIGITS = 20


def block_key_prefix(namespace: NamespaceId) -> bytes:
    """What precedes a block's hash in its key."""
    assert not set("{}") & set(namespace)
    return _PREFIX + b"{" + namespace.encode() + _BLOCK


def events_key(namespace: NamespaceId, holder: HolderId) -> bytes:
    """The stream of one holder's changes in one namespace."""
    assert not set("{}") & set(namespace)
    return _PREFIX + b"{" + namespace.encode() + _EVENTS + holder.encode()


def member_key(holder: HolderId) -> bytes:
    """The liveness record of one holder."""
    return MEMBER_KEY_PREFIX + holder.encode()


def mark_key(reader: str) -> bytes:
    """The mark of one reader of the members."""
    return _MARK_KEY_PREFIX + reader.encode()


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A key that names a block."""

    namespace: NamespaceId
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class EventsKey:
    """A key that names a holder's stream."""

    namespace: NamespaceId
    holder: HolderId


def parse_key(key: bytes) -> BlockKey | EventsKey | None:
    """What a key found by scanning names; None for members and for junk."""
    if not key.startswith(_PREFIX + b"{"):
        return None
    namespace, closing, rest = key[len(_PREFIX) + 1 :].partition(b"}")
    kind, name = (closing + rest)[: len(_BLOCK)], (closing + rest)[len(_BLOCK) :]
    try:
        if kind == _BLOCK and len(name) in _HASH_BYTES:
            return BlockKey(NamespaceId(namespace.decode()), BlockHash(name))
        if kind == _EVENTS and name:
            return EventsKey(NamespaceId(namespace.decode()), HolderId(name.decode()))
    except UnicodeDecodeError:
        return None
    return None


def incarnation_text(incarnation: int) -> bytes:
    """An incarnation as 20 digits, in an order that is also the texts' order."""
    assert 0 < incarnation < 2**63
    return b"%020d" % incarnation


def parse_incarnation(text: bytes) -> int | None:
    """The incarnation that a value begins with (or consists of); None when it does not."""
    digits = text[:INCARNATION_DIGITS]
    return int(digits) if len(digits) == INCARNATION_DIGITS and digits.isdigit() else None


def entry_value(incarnation: int, tier: Tier) -> bytes:
    """What a block's hash holds for one holder."""
    return incarnation_text(incarnation) + b":" + tier.value.encode()


def pack_hashes(blocks: Sequence[BlockHash]) -> tuple[bytes, int]:
    """All hashes in one argument, and the bytes of each. They are all of one length; at least one."""
    assert blocks
    width = len(blocks[0])
    assert all(len(block_hash) == width for block_hash in blocks)
    return b"".join(blocks), width
