"""The local system's copy of the tenants file lets the supervisor in, follows the original, and outlives mistakes."""

from pathlib import Path

import pytest
import yaml

from headrace.core.tenants import HashedKey, TenantRole, new_key
from headrace.gateway.read_tenants import read_tenants
from headrace_cluster.tenants_copy import TenantsCopy


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    write(path, "acme")
    return path


def write(path: Path, *names: str) -> None:
    rows = [{"name": name, "keys": [HashedKey.of(new_key()).spell()]} for name in names]
    path.write_text(yaml.safe_dump({"tenants": rows}))


def make_copy(original: Path, tmp_path: Path) -> TenantsCopy:
    private = tmp_path / "private"
    private.mkdir()
    return TenantsCopy(str(original), directory=private, instance_id="abc")


def names_in(copy: TenantsCopy) -> list[str]:
    return [tenant.name for tenant in read_tenants(copy.path).tenants]


def test_the_supervisors_key_is_an_admins_and_stands_in_the_copy_only(original, tmp_path):
    copy = make_copy(original, tmp_path)
    tenant = read_tenants(copy.path).tenant_of(copy.key)
    assert tenant is not None
    assert (tenant.name, tenant.role) == ("supervisor-abc", TenantRole.ADMIN)
    assert copy.key not in Path(copy.path).read_text()
    assert Path(copy.path).stat().st_mode & 0o077 == 0
    assert "supervisor" not in original.read_text()


def test_a_changed_file_is_copied_and_the_supervisor_keeps_its_key(original, tmp_path):
    copy = make_copy(original, tmp_path)
    assert copy.follow() == ""
    write(original, "acme", "beta")
    assert copy.follow() == ""
    assert names_in(copy) == ["acme", "beta", "supervisor-abc"]
    assert read_tenants(copy.path).tenant_of(copy.key) is not None


@pytest.mark.parametrize("broken", ["tenants: [", "tenants:\n", "[]", "", b"\xff\xfe\xff", "- 2026-13-01", "[" * 2_000])
def test_a_broken_file_is_told_once_without_its_text_and_the_copy_stays(original, tmp_path, broken):
    copy = make_copy(original, tmp_path)
    original.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    told = copy.follow()
    assert str(original) in told
    assert copy.follow() == ""
    assert names_in(copy) == ["acme", "supervisor-abc"]
    write(original, "beta")
    assert copy.follow() == ""
    assert names_in(copy) == ["beta", "supervisor-abc"]


def test_a_file_that_is_gone_changes_nothing(original, tmp_path):
    copy = make_copy(original, tmp_path)
    original.unlink()
    assert str(original) in copy.follow()
    assert names_in(copy) == ["acme", "supervisor-abc"]
