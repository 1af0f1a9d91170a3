"""The commands that `up` prints can be pasted."""

from types import SimpleNamespace

from headrace.admin.system_commands import print_next_steps
from headrace.config import load_config


def test_the_commands_that_up_prints_reach_a_system_whose_directory_a_file_named(tmp_path, capsys):
    """Fails when they are those of the usual directory, where another system is or none."""
    here, there = (load_config({"state_dir": str(tmp_path / name)} if name else {}) for name in ("", "there"))
    state = SimpleNamespace(grpc_target="127.0.0.1:7", tls_ca_file="/ca.pem", tls_cert_file="", tls_key_file="")
    print_next_steps(there, state)
    told = capsys.readouterr().out
    assert f"down --state-dir {tmp_path / 'there'}" in told
    assert "cache ls --address 127.0.0.1:7 --tls-ca-file /ca.pem\n" in told
    print_next_steps(here, state)
    assert "--" not in capsys.readouterr().out
