"""How the index is laid out in Redis. No other file spells a key or a value's form.

    hr1:{<shard>}:b:<namespace>:<block hash, raw bytes>   hash     holder id -> "<incarnation>:<tier>"
    hr1:{<shard>}:e                                       stream   changes of all its namespaces, capped; see below
    hr1:{<shard>}:n                                       hash     "<incarnation>:<holder id>" -> changes so far
    hr1:{members}:ids                                     set      holder ids that were ever announced
    hr1:{members}:m:<holder id>                           string   "<incarnation>:<record in msgpack>", with a TTL
    hr1:{members}:p:<reader>                              string   two numbers, with a TTL: a reader's mark, see
                                                                   `redis_membership`

`hr1` is the version of all of this: another layout takes another prefix, so that what does not parse under this one is
junk and may be dropped. The braces are Redis Cluster's hash tag: whatever one script touches lies in one slot. A
namespace lies in one of INDEX_SHARDS shards, and the shard is the tag. Were it the namespace, each would need a stream
of its own, which a mirror could not know of beforehand; with a namespace for each cache salt there may be any number.
Scripts get a key *prefix* and append block hashes to it, since 8,192 keys in one call would cost more than the lookup.

`<incarnation>` is 20 decimal digits, so that Lua compares it as text: its numbers are doubles and exact only to 2^53.

An event is written by the script that makes the change. Its fields, always all and in this order (then a stream does
not store their names again): `holder`, `incarnation`, `number`, `op`, `tier`, `namespace`, `width` (bytes of a hash),
`blocks` (hashes, packed). `op` is "+" (registered), "-" (deregistered; also what older incarnations of the holder had)
or "?" (entries of that incarnation were swept; which ones is not said, `blocks` is empty). `number` counts the events
of one holder and incarnation in one shard from 1 without a gap, so a reader that misses one knows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.block import BlockHash, HolderId, NamespaceId, Tier, shard_of
from headrace.core.index_limits import INDEX_SHARDS

_PREFIX = b"hr1:"
_MEMBERS = _PREFIX + b"{members}:"
_HASH_BYTES = (16, 32)

ALL_KEYS_PATTERN = _PREFIX + b"*"
BLOCK_KEYS_PATTERN = _PREFIX + b"{*}:b:*"
MEMBER_IDS_KEY = _MEMBERS + b"ids"
MEMBER_KEY_PREFIX = _MEMBERS + b"m:"
_MARK_KEY_PREFIX = _MEMBERS + b"p:"

INCARNATION_DIGITS = 20

# What is asked of Redis, scripts included, and all that an ACL user for it needs (docs/security.md has the line).
COMMANDS = tuple(
    "del eval evalsha exists get getrange hdel hget hgetall hincrby hlen hmget hrandfield hset info pttl sadd scan set"
    " srandmember srem strlen xadd xinfo|stream xread".split()
)


# What is asked of the servers of a Redis Cluster besides.
CLUSTER_COMMANDS = ("asking", "cluster|slots")


def acl_rules(*, in_cluster: bool = False) -> str:
    """The rules of an ACL user that may do what this index does, to its own keys, and nothing else. SCAN names keys of
    others too, and INFO tells of the server: neither can be had in part."""
    allowed = " ".join(f"+{command}" for command in (*COMMANDS, *(CLUSTER_COMMANDS if in_cluster else ())))
    return f"resetkeys ~{ALL_KEYS_PATTERN.decode()} resetchannels -@all {allowed}"


def block_key_prefix(namespace: NamespaceId) -> bytes:
    """What precedes a block's hash in its key."""
    assert not set("{}:") & set(namespace)
    return _shard_prefix(shard_of(namespace)) + b"b:" + namespace.encode() + b":"


def events_key(shard: int) -> bytes:
    """The stream of a shard's changes."""
    return _shard_prefix(shard) + b"e"


def numbers_key(shard: int) -> bytes:
    """How many changes each holder has made in a shard under each incarnation."""
    return _shard_prefix(shard) + b"n"


def _shard_prefix(shard: int) -> bytes:
    assert 0 <= shard < INDEX_SHARDS
    return _PREFIX + b"{%d}:" % shard


# A key in each slot that has keys of ours.
SLOT_KEYS = (MEMBER_IDS_KEY, *(events_key(shard) for shard in range(INDEX_SHARDS)))


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
class NumbersKey:
    """A key under which the changes of a shard's holders are counted."""

    shard: int


def parse_key(key: bytes) -> BlockKey | NumbersKey | None:
    """What a key found by scanning names; None for the others and for junk."""
    tag, closing, rest = key.removeprefix(_PREFIX + b"{").partition(b"}:")
    if not key.startswith(_PREFIX + b"{") or not closing or len(tag) > 3 or not tag.isdigit():
        return None
    if int(tag) >= INDEX_SHARDS:
        return None
    if rest == b"n":
        return NumbersKey(int(tag))
    kind, _, named = rest.partition(b":")
    text, _, block_hash = named.partition(b":")
    try:
        namespace = NamespaceId(text.decode())
    except UnicodeDecodeError:
        return None
    if kind != b"b" or len(block_hash) not in _HASH_BYTES or shard_of(namespace) != int(tag):
        return None
    return BlockKey(namespace, BlockHash(block_hash))


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


class Op(StrEnum):
    """What an event says."""

    REGISTERED = "+"
    DEREGISTERED = "-"
    SWEPT = "?"


@dataclass(frozen=True, slots=True)
class Event:
    """One change, as its holder's `number`-th in the shard."""

    holder: HolderId
    incarnation: int
    number: int
    op: Op
    namespace: NamespaceId
    blocks: tuple[BlockHash, ...]


def parse_event(fields: Sequence[bytes]) -> Event | None:
    """The event in an entry of a stream, given as {field, value, field, value, ...}; None when it is junk."""
    try:
        holder, incarnation, number, op, _, namespace, width, packed = fields[1::2]
        step = int(width)
        if step not in _HASH_BYTES or len(packed) % step:
            return None
        return Event(
            holder=HolderId(holder.decode()),
            incarnation=int(incarnation),
            number=int(number),
            op=Op(op.decode()),
            namespace=NamespaceId(namespace.decode()),
            blocks=tuple(BlockHash(packed[start : start + step]) for start in range(0, len(packed), step)),
        )
    except ValueError:  # UnicodeDecodeError is one
        return None


def parse_numbers(pairs: Sequence[bytes]) -> dict[tuple[HolderId, int], int]:
    """Changes so far by holder and incarnation, from {field, value, ...} of a numbers key; junk is left out."""
    numbers = {}
    for field, value in zip(pairs[::2], pairs[1::2], strict=True):
        incarnation, holder = parse_incarnation(field), field[INCARNATION_DIGITS + 1 :]
        try:
            if incarnation is not None and holder:
                numbers[HolderId(holder.decode()), incarnation] = int(value)
        except ValueError:
            continue
    return numbers
