"""Liveness records as bytes: msgpack maps with a version, strict in both directions.

A record of this version has exactly the fields of its dataclass, each of exactly its type. Anything else (cut, of
another type, of another version, with a field more) is JunkRecord: its owner counts as absent, never as half known.
Adding or renaming a field therefore takes a new RECORD_VERSION. The version before is read as well, and written by
whoever has nothing to say in the new fields: during an upgrade the old and the new know each other.
"""

import math
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin

import msgpack

from headrace.core.index_limits import MEMBER_RECORD_BYTES_MAX
from headrace.core.members import GatewayRecord, MemberRecord, StoreNodeRecord, WorkerRecord

RECORD_VERSION = 5
_VERSION_BEFORE = 4
_NEW_FIELDS = {"ray_cluster": ""}  # of workers, since the version before; and what they hold when they say nothing

_KIND_TO_TYPE: dict[str, type[MemberRecord]] = {
    "store_node": StoreNodeRecord,
    "worker": WorkerRecord,
    "gateway": GatewayRecord,
}
_TYPE_TO_KIND = {kind_type: kind for kind, kind_type in _KIND_TO_TYPE.items()}


class JunkRecord(ValueError):
    """Not a record of this version or the one before."""


def encode_record(record: MemberRecord) -> bytes:
    """`{"version", "kind", "record": {field: value}}`; enums as their text, dataclasses as maps."""
    kind = _TYPE_TO_KIND[type(record)]
    version, told = RECORD_VERSION, asdict(record)
    if all(told.get(name, nothing) == nothing for name, nothing in _NEW_FIELDS.items()):
        version, told = _VERSION_BEFORE, {name: value for name, value in told.items() if name not in _NEW_FIELDS}
    data: bytes = msgpack.packb({"version": version, "kind": kind, "record": told})
    assert len(data) <= MEMBER_RECORD_BYTES_MAX, f"a record of {len(data)} bytes would be ignored by its readers"
    return data


def decode_record(data: bytes) -> MemberRecord:
    """The inverse. Raises JunkRecord."""
    if len(data) > MEMBER_RECORD_BYTES_MAX:
        raise JunkRecord(f"{len(data)} bytes")
    try:
        outer = msgpack.unpackb(data, raw=False)
    except (ValueError, msgpack.UnpackException) as error:  # UnicodeDecodeError is a ValueError
        raise JunkRecord(f"not msgpack: {error}") from error
    if not isinstance(outer, dict) or outer.keys() != {"version", "kind", "record"}:
        raise JunkRecord("not a versioned record")
    if outer["version"] not in (RECORD_VERSION, _VERSION_BEFORE):
        raise JunkRecord(f"version {str(outer['version'])[:20]}, this is version {RECORD_VERSION}")
    if not isinstance(outer["kind"], str) or outer["kind"] not in _KIND_TO_TYPE:
        raise JunkRecord("unknown kind")
    told = outer["record"]
    if outer["version"] == _VERSION_BEFORE and outer["kind"] == "worker" and isinstance(told, dict):
        if not told.keys().isdisjoint(_NEW_FIELDS):
            raise JunkRecord("record has other fields")
        told = told | _NEW_FIELDS
    record: MemberRecord = _decode(_KIND_TO_TYPE[outer["kind"]], told, "record")
    return record


def _decode(wanted: Any, value: Any, where: str) -> Any:
    """A value as the field type `wanted`: a dataclass, a tuple of one kind, a StrEnum, or str, int, bool or a finite
    float (or a NewType of those)."""
    wanted = getattr(wanted, "__supertype__", wanted)
    if get_origin(wanted) is tuple:
        (kind, dots) = get_args(wanted)
        assert dots is Ellipsis, f"{where}: {wanted} is no type for a record"
        if not isinstance(value, list):
            raise JunkRecord(f"{where} is not a list")
        return tuple(_decode(kind, each, where) for each in value)
    if is_dataclass(wanted) and isinstance(wanted, type):
        row = {field.name: field.type for field in fields(wanted)}
        if not isinstance(value, dict) or value.keys() != row.keys():
            raise JunkRecord(f"{where} has other fields")
        return wanted(**{name: _decode(kind, value[name], name) for name, kind in row.items()})
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        try:
            return wanted(value)
        except ValueError:
            raise JunkRecord(f"{where} is unknown") from None
    assert wanted in (str, int, bool, float), f"{where}: {wanted} is no type for a record"
    if type(value) is not wanted or (wanted is float and not math.isfinite(value)):
        raise JunkRecord(f"{where} is not a {wanted.__name__}")
    return value
