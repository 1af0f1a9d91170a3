"""API keys, tenants and trust groups: who a key stands for, and that no two groups can ever share a namespace."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_gateway import make_namespace

from headrace.core.tenants import (
    HashedKey,
    KeyRing,
    Tenant,
    TenantRole,
    is_usable_key,
    new_key,
    trust_group_of,
)

SPELLINGS = st.text(alphabet="0123456789:@ab", max_size=8)


def make_ring(*tenants: Tenant) -> tuple[KeyRing, list[str]]:
    keys = [new_key() for _ in tenants]
    return KeyRing(tuple((HashedKey.of(k), t) for k, t in zip(keys, tenants, strict=True))), keys


def test_a_key_finds_its_tenant_and_a_changed_one_finds_nobody():
    """Fails when a prefix, another case or a tail of a key is enough."""
    ring, (first, second) = make_ring(Tenant("a", "tenant:a"), Tenant("b", "tenant:b", TenantRole.ADMIN))
    assert ring.tenant_of(first).name == "a"
    assert ring.tenant_of(second).is_admin
    for wrong in ("", first[:-1], first + "x", first.swapcase(), first + second, new_key()):
        assert ring.tenant_of(wrong) is None


def test_a_key_at_rest_is_salted_and_reads_back():
    """Fails when the same key is stored alike twice, in clear, or does not survive the file."""
    key = new_key()
    one, two = HashedKey.of(key), HashedKey.of(key)
    assert one.spell() != two.spell()
    assert key not in one.spell()
    read = HashedKey.parse(one.spell())
    assert read == one
    assert read.matches(key)


@pytest.mark.parametrize("spelled", ["", "hr-in-clear", "sha256:aa:bb", "md5:" + "0" * 32 + ":" + "0" * 64])
def test_what_is_no_hashed_key_is_not_taken_for_one(spelled):
    """Fails when a key in clear, or a scheme that is not ours, is let in as a hash."""
    assert HashedKey.parse(spelled) is None


def test_fresh_keys_are_usable_and_short_or_odd_ones_are_not():
    """Fails when a guessable key, or one that breaks a header, is accepted."""
    assert len({new_key() for _ in range(100)}) == 100
    assert is_usable_key(new_key())
    assert not any(map(is_usable_key, ["short", "x" * 513, "with space " * 3, "néw" * 10, "line\n" * 6]))


@given(first=st.tuples(SPELLINGS, SPELLINGS), second=st.tuples(SPELLINGS, SPELLINGS))
def test_two_callers_share_a_namespace_only_with_equal_group_and_equal_salt(first, second):
    """Fails when a salt can be chosen so that it spells another group, or a group's name spells a salted one."""
    one, two = (make_namespace().narrowed(salt, trust_group=group) for group, salt in (first, second))
    assert (one.id == two.id) == (first == second)


@given(salt=SPELLINGS, group=SPELLINGS, other=SPELLINGS)
def test_no_salt_reaches_another_deployments_group(salt, group, other):
    """Fails when narrowing forgets what it narrows: the deployment's own trust_group setting."""
    base, elsewhere = make_namespace(), replace(make_namespace(), trust_group="default2")
    assert base.narrowed(salt, trust_group=group).id != elsewhere.narrowed(salt, trust_group=other).id


def test_a_tenants_own_group_is_never_a_named_one():
    """Fails when a tenant can come into another's group by its name."""
    assert trust_group_of("a", None) != trust_group_of("b", "a")
    assert trust_group_of("a", "x") == trust_group_of("b", "x")


def test_a_key_ring_names_every_tenant_and_every_group_once():
    """Fails when a gateway takes one tenant with two keys for two who share it."""
    one, two, three = Tenant("a", "g"), Tenant("b", "g"), Tenant("c", "h")
    ring, _ = make_ring(one, two, one, three)
    assert (ring.tenants, ring.trust_groups) == ((one, two, three), ("g", "h"))
