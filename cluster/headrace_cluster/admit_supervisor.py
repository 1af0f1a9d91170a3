"""A key for the supervisor itself, where the local system has tenants: it waits for its parts through the same front
door as everybody else.

The gateways of this instance read a copy of the operator's tenants file with one more tenant, which exists as long as
the instance does. The copy holds hashed keys only; the supervisor's own key stays in its memory.
"""

from pathlib import Path

import yaml

from headrace.core.tenants import HashedKey, TenantRole, new_key


def admit_supervisor(tenants_file: str, *, directory: Path, instance_id: str) -> tuple[str, str]:
    """Write the copy into `directory` (private to this user); returns its path and the key that it lets in.

    tenants_file: a file that `read_tenants` accepts.
    """
    key = new_key()
    tenants = yaml.safe_load(Path(tenants_file).read_text(encoding="utf-8"))
    tenants["tenants"].append(
        {"name": f"supervisor-{instance_id}", "role": TenantRole.ADMIN.value, "keys": [HashedKey.of(key).spell()]}
    )
    copy = directory / "tenants.yaml"
    copy.write_text(yaml.safe_dump(tenants), encoding="utf-8")
    copy.chmod(0o600)
    return str(copy), key
