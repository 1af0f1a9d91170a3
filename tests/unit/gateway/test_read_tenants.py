"""The tenants file: what it means, and that mistakes in it stop the start without showing a key."""

import pytest

from headrace.core.errors import ConfigInvalid
from headrace.core.tenants import HashedKey, TenantRole, new_key
from headrace.gateway.read_tenants import read_tenants

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
