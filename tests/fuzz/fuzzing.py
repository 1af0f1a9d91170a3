"""How a parser is fuzzed: input that is nearly right, for so many examples in each test run, or for FUZZ_SECONDS.

What a parser may do with input from outside is to answer, or to raise the errors named; anything else is a fault:
another error, or a hang (pytest's own time-out).
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
EXAMPLES = 40

Check = Callable[[Any], object]


def fuzz(strategy: st.SearchStrategy[Any], check: Check, *, refuses: tuple[type[Exception], ...] = ()) -> None:
    """Run `check` on examples: EXAMPLES of them, always the same ones, or other ones for FUZZ_SECONDS."""

    def only_typed(value: Any) -> None:
        with contextlib.suppress(*refuses):
            check(value)

    fixed = settings(
        max_examples=500 if SECONDS else EXAMPLES,
        derandomize=not SECONDS,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if SECONDS else [])],  # what is slow is slow to shrink
        suppress_health_check=list(HealthCheck),
    )
    run, end_s = fixed(given(strategy)(only_typed)), time.monotonic() + SECONDS
    run()
    while time.monotonic() < end_s:
        run()


EDGES = [bytes(4), b"\xff" * 4, b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f"]  # of 32-bit numbers


@st.composite
def mutated(draw: st.DrawFn, *seeds: bytes) -> bytes:
    """One of these with a few bytes changed, cut out, doubled, put in or taken from another; or any bytes at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["flip", "cut", "double", "insert", "end", "number"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:end]
            case "double":
                data[at:at] = data[at:end] * draw(st.integers(1, 50))
            case "insert":
                data[at:at] = draw(st.binary(max_size=20))
            case "end":
                del data[at:]
            case "number" if len(data) >= at + 4:
                data[at : at + 4] = draw(st.sampled_from(EDGES))
    return bytes(data)


NUMBERS = st.one_of(
    st.integers(-5, 5), st.integers(), st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**400]), st.floats()
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def objects(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields, each right or of any kind, and sometimes another one."""
    fields = {name: st.one_of(right, right, JSON) for name, right in known.items()}
    named = st.fixed_dictionaries({}, optional=fields)
    return st.builds(lambda a, b: {**b, **a}, named, st.dictionaries(st.text(max_size=8), JSON, max_size=1))


@st.composite
def messages(draw: st.DrawFn, kind: Any, depth: int = 0) -> Any:
    """A protobuf message with some fields set to anything that their types hold."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if depth > 3 or not draw(st.booleans()):
            continue
        for _ in range(draw(st.integers(1, 3)) if field.is_repeated else 1):
            value = draw(_values(field, depth))
            if value is None:
                continue
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                target = getattr(message, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(value)
            elif field.message_type is not None:
                getattr(message, field.name)["key"] = "value"
            elif field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


def _values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return st.just("map")
        return messages(field.message_type._concrete_class, depth + 1)
    if field.enum_type is not None:
        return st.integers(-3, 9)
    odd = st.sampled_from([0, 1, 64, 2**31 - 1])
    return (
        {
            field.CPPTYPE_INT32: st.one_of(odd, st.integers(-(2**31), 2**31 - 1)),
            field.CPPTYPE_UINT32: st.one_of(odd, st.integers(0, 2**32 - 1)),
            field.CPPTYPE_INT64: st.one_of(odd, st.integers(-(2**63), 2**63 - 1)),
            field.CPPTYPE_UINT64: st.one_of(odd, st.integers(0, 2**64 - 1)),
            field.CPPTYPE_DOUBLE: st.floats(),
            field.CPPTYPE_FLOAT: st.floats(width=32),
            field.CPPTYPE_BOOL: st.booleans(),
            field.CPPTYPE_STRING: st.one_of(
                st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
                st.sampled_from(["0" * 32, "tiny", "../x"]),
            ),
            field.cpp_type: st.binary(max_size=40) if field.type == field.TYPE_BYTES else st.nothing(),
        }.get(field.cpp_type)
        if field.type != field.TYPE_BYTES
        else st.binary(max_size=40)
    )
