"""The tenants file: what it means, and that mistakes in it stop the start without showing a key."""

import pytest

from headrace.core.errors import ConfigInvalid
from headrace.core.tenants import HashedKey, TenantRole, new_key
from headrace.gateway.read_tenants import read_tenants
from headrace.gateway.tenants_file import TenantsFile

LINE = HashedKey.of(new_key()).spell()
SECRET = "hr-this-is-a-key-in-clear-text"


def write(tmp_path, text):
    path = tmp_path / "tenants.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_each_tenant_is_a_group_of_its_own_unless_the_operator_names_one(tmp_path):
    """Fails when two tenants meet without being put together, or are not when they are."""
    keys = [new_key() for _ in range(5)]
    lines = [HashedKey.of(key).spell() for key in keys]
    ring = read_tenants(
        write(
            tmp_path,
            f"tenants:\n- {{name: a, keys: ['{lines[0]}', '{lines[1]}']}}\n- {{name: b, keys: ['{lines[2]}']}}\n"
            f"- {{name: c, trust_group: b, keys: ['{lines[3]}']}}\n"
            f"- {{name: d, trust_group: b, role: admin, keys: ['{lines[4]}']}}\n",
        )
    )
    a, again, b, c, d = (ring.tenant_of(key) for key in keys)
    assert a == again
    assert len({a.trust_group, b.trust_group, c.trust_group}) == 3
    assert c.trust_group == d.trust_group
    assert [t.role for t in ring.tenants] == [TenantRole.USER] * 3 + [TenantRole.ADMIN]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one key, `tenants`"),
        ("tenants: []", "at least one tenant"),
        ("tenant: []", "one key, `tenants`"),
        (f"tenants: [{SECRET}", "is not YAML"),
        (f"tenants: [{{name: a, keys: [{SECRET}]}}]", "keys in clear are refused"),
        ("tenants: [{name: a, keys: []}]", "at least one line"),
        (f"tenants: [{{name: 'a b', keys: ['{LINE}']}}]", "needs a name"),
        (f"tenants: [{{keys: ['{LINE}']}}]", "needs a name"),
        (f"tenants: [{{name: a, role: root, keys: ['{LINE}']}}]", "user or admin"),
        (f"tenants: [{{name: a, role: [], keys: ['{LINE}']}}]", "user or admin"),
        (f"tenants: [{{name: a, trust_group: '', keys: ['{LINE}']}}]", "trust_group must be a name"),
        (f"tenants: [{{name: a, quota: 5, keys: ['{LINE}']}}]", "unknown field 'quota'"),
        (f"tenants: [{{name: a, keys: ['{LINE}']}}, {{name: b, keys: ['{LINE}']}}]", "same key line twice"),
        (f"tenants: [{{name: a, ttl: 5, keys: ['{LINE}']}}]", "ttl is a number with s, m, h or d"),
        (f"tenants: [{{name: a, ttl: 1s, keys: ['{LINE}']}}]", "ttl must lie in"),
        (f"tenants: [{{name: a, quota_mb: '5', keys: ['{LINE}']}}]", "quota_mb must be a whole number of MiB"),
        (f"tenants: [{{name: a, quota_mb: true, keys: ['{LINE}']}}]", "quota_mb must be a whole number of MiB"),
        (f"tenants: [{{name: a, protected_mb: -1, keys: ['{LINE}']}}]", "protected_mb must be a whole number of MiB"),
        (f"tenants: [{{name: a, requests_per_minute: 0, keys: ['{LINE}']}}]", "requests_per_minute must lie in 1.."),
        (f"tenants: [{{name: a, tokens_per_minute: '9', keys: ['{LINE}']}}]", "tokens_per_minute must lie in 1.."),
        (f"tenants: [{{name: a, concurrent_max: true, keys: ['{LINE}']}}]", "concurrent_max must lie in 1.."),
        (f"tenants: [{{name: a, priority_max: 5, keys: ['{LINE}']}}]", "priority_max must lie in -4..4"),
        (f"tenants: [{{name: a, priority_max: true, keys: ['{LINE}']}}]", "priority_max must lie in -4..4"),
        (f"tenants: [{{name: a, quota_mb: 2, protected_mb: 3, keys: ['{LINE}']}}]", "larger than quota_mb"),
        (
            f"tenants: [{{name: a, trust_group: g, quota_mb: 2, keys: ['{LINE}']}},"
            f" {{name: b, trust_group: g, quota_mb: 3, keys: ['{HashedKey.of(SECRET).spell()}']}}]",
            "'b': quota_mb 3 contradicts 2 of its trust group",
        ),
        (
            f"tenants: [{{name: a, keys: ['{LINE}']}}, {{name: a, keys: ['{HashedKey.of(SECRET).spell()}']}}]",
            "'a' stands there twice",
        ),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_and_quotes_no_key(tmp_path, text, words):
    """Fails when a mistake lets somebody in, keeps everybody out silently, or shows a secret in a log."""
    with pytest.raises(ConfigInvalid, match="tenants_file") as refused:
        read_tenants(write(tmp_path, text))
    assert words in str(refused.value)
    assert SECRET not in str(refused.value)
    assert SECRET not in str(refused.value.__cause__)


def test_a_missing_file_is_refused(tmp_path):
    """Fails when a wrong path means that everybody is let in."""
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        read_tenants(tmp_path / "none.yaml")


def test_bounds_are_those_of_the_whole_trust_group_and_a_time_to_live_is_each_tenants_own(tmp_path):
    """Fails when a tenant escapes the quota of its group by leaving it out, or bounds are not MiB."""
    keys = [new_key() for _ in range(3)]
    lines = [HashedKey.of(key).spell() for key in keys]
    ring = read_tenants(
        write(
            tmp_path,
            f"tenants:\n- {{name: a, trust_group: g, ttl: 5m, quota_mb: 3, keys: ['{lines[0]}']}}\n"
            f"- {{name: b, trust_group: g, protected_mb: 2, quota_mb: 3, keys: ['{lines[1]}']}}\n"
            f"- {{name: c, keys: ['{lines[2]}']}}\n",
        )
    )
    a, b, c = (ring.tenant_of(key) for key in keys)
    assert [(t.bytes_max, t.bytes_min) for t in (a, b, c)] == [(3 << 20, 2 << 20), (3 << 20, 2 << 20), (None, 0)]
    assert [t.ttl_s for t in (a, b, c)] == [300.0, None, None]


def one_tenant(name, key):
    return f"tenants: [{{name: {name}, keys: ['{HashedKey.of(key).spell()}']}}]"


async def test_a_changed_file_counts_once_it_rests(tmp_path):
    """Fails when a file that is just being written is read half, or a change is never seen."""
    old, new = new_key(), new_key()
    file = TenantsFile(write(tmp_path, one_tenant("a", old)))
    first = file.key_ring
    await file.reread()
    write(tmp_path, "tenants: [")
    await file.reread()  # the first look may be in the midst of writing
    write(tmp_path, one_tenant("longer", new))
    await file.reread()
    assert file.key_ring is first
    await file.reread()
    changed = file.key_ring
    assert (changed.tenant_of(new).name, changed.tenant_of(old)) == ("longer", None)
    for _ in range(3):
        await file.reread()
    assert file.key_ring is changed, "a file that rests is not read again"


@pytest.mark.parametrize("broken", ["tenants: [", None], ids=["broken", "gone"])
async def test_a_file_that_broke_is_logged_and_the_one_before_stays_in_force(tmp_path, caplog, broken):
    """Fails when an operator's slip locks everybody out, or is repeated in the log every second."""
    key = new_key()
    path = write(tmp_path, one_tenant("a", key))
    file = TenantsFile(path)
    if broken is None:
        path.unlink()
    else:
        write(tmp_path, broken)
    for _ in range(4):
        await file.reread()
    assert file.key_ring.tenant_of(key).name == "a"
    assert caplog.text.count("the one before stays in force") == 1
    write(tmp_path, one_tenant("again", key))
    for _ in range(3):
        await file.reread()
    assert file.key_ring.tenant_of(key).name == "again"


def test_a_tenants_priority_is_the_normal_one_unless_the_file_says_more(tmp_path):
    """Fails when a tenant may outrank others without the operator's word."""
    lines = [HashedKey.of(new_key()).spell() for _ in range(2)]
    ring = read_tenants(
        write(
            tmp_path,
            f"tenants:\n- {{name: a, keys: ['{lines[0]}']}}\n- {{name: b, priority_max: -2, keys: ['{lines[1]}']}}",
        )
    )
    assert [tenant.priority_max for tenant in ring.tenants] == [0, -2]
