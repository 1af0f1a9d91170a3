"""Settings: one table, one parse, refusal with the key's name."""

from pathlib import Path

import pytest

from headrace.config import Config, config_to_flat, load_config, settings_markdown, settings_table
from headrace.core.errors import ConfigInvalid
from headrace.core.telemetry_limits import METRICS_PORTS


def test_flags_win_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "headrace.yaml"
    file.write_text("arena_mb: 10\npool_tokens: 1000\nblock_tokens: 32\n")
    config = load_config(
        {"arena_mb": 30}, environ={"HEADRACE_ARENA_MB": "20", "HEADRACE_POOL_TOKENS": "2000"}, config_file=file
    )
    assert config.store.arena_mb == 30
    assert config.engine.pool_tokens == 2_000
    assert config.engine.block_tokens == 32
    assert config.gateway.http_port == Config().gateway.http_port


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5", "", "4096"])
def test_impossible_block_sizes_are_refused_by_name(value):
    with pytest.raises(ConfigInvalid, match="block_tokens"):
        load_config(environ={"HEADRACE_BLOCK_TOKENS": value})


def test_a_block_larger_than_the_context_is_refused():
    with pytest.raises(ConfigInvalid, match="block_tokens"):
        load_config({"block_tokens": 512, "context_tokens_max": 256}, environ={})


@pytest.mark.parametrize("value", [1, 7])
def test_odd_block_sizes_are_allowed(value):
    assert load_config({"block_tokens": value}, environ={}).engine.block_tokens == value


@pytest.mark.parametrize("value", ["int4", "int8_token", ""])
def test_a_codec_that_no_store_has_is_refused_by_name(value):
    with pytest.raises(ConfigInvalid, match="store_codec"):
        load_config({"store_codec": value}, environ={})


def test_a_pool_has_a_codec_or_its_store_and_never_both():
    """What was quantised once would lose twice."""
    with pytest.raises(ConfigInvalid, match="pool_codec"):
        load_config({"pool_codec": "int4"}, environ={})
    with pytest.raises(ConfigInvalid, match="store_codec"):
        load_config({"pool_codec": "int8", "store_codec": "int8"}, environ={})
    assert load_config({"pool_codec": "fp8"}, environ={}).engine.pool_codec == "fp8"


def test_flex_attention_is_refused_where_bits_are_promised_or_a_pool_holds_codes():
    """Fails if exact mode could run on kernels whose bits depend on the batch."""
    with pytest.raises(ConfigInvalid, match=r"attention_backend.*exact"):
        load_config({"attention_backend": "flex"}, environ={})
    with pytest.raises(ConfigInvalid, match=r"attention_backend.*pool_codec"):
        load_config({"attention_backend": "flex", "exact": False, "pool_codec": "int8"}, environ={})
    with pytest.raises(ConfigInvalid, match="auto, gather, flex"):
        load_config({"attention_backend": "sdpa"}, environ={})
    assert load_config({"attention_backend": "flex", "exact": False}, environ={}).model.attention_backend == "flex"


def test_unknown_keys_are_refused_by_name(tmp_path):
    file = tmp_path / "headrace.yaml"
    file.write_text("arena_gb: 10\n")
    with pytest.raises(ConfigInvalid, match="arena_gb"):
        load_config(config_file=file, environ={})


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_a_broken_file_is_refused(tmp_path, text):
    file = tmp_path / "headrace.yaml"
    file.write_text(text)
    with pytest.raises(ConfigInvalid):
        load_config(config_file=file, environ={})


def test_a_boolean_is_not_a_number():
    """Fails if True were read as block_tokens 1."""
    with pytest.raises(ConfigInvalid, match="block_tokens"):
        load_config({"block_tokens": True}, environ={})


def test_a_config_survives_being_handed_to_another_process():
    config = load_config({"arena_mb": 64, "exact": False, "model": "x"}, environ={})
    assert load_config(config_to_flat(config), environ={}) == config


def test_every_setting_has_one_line_of_help():
    for name, (_, row) in settings_table().items():
        assert row.metadata["help"].endswith("."), name


def test_the_documented_table_is_the_table():
    """Fails when a setting is added or changed and docs/configuration.md is not."""
    documented = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert settings_markdown() in documented


def test_tenants_need_the_hash_that_withstands_collisions():
    """Fails when tenants that do not trust each other are kept apart by a hash that one of them could break."""
    with pytest.raises(ConfigInvalid, match="must be sha256 with a tenants_file"):
        load_config({"tenants_file": "t.yaml"}, environ={})
    assert load_config({"tenants_file": "t.yaml", "hash_algorithm": "sha256"}, environ={}).gateway.tenants_file


@pytest.mark.parametrize(
    "origins",
    ["chat.example", "https://a.example/", "https://*.example", "https://a https://b", "*", "ftp://a.example"],
)
def test_an_origin_that_browsers_would_never_send_is_refused(origins):
    """Fails when a slip lets no page in and says nothing, or lets every page in where there are no keys."""
    with pytest.raises(ConfigInvalid, match="http_allowed_origins"):
        load_config({"http_allowed_origins": origins}, environ={})


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        ("https://Chat.example", "https://chat.example"),
        ("HTTPS://chat.example", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://localhost:80", "http://localhost"),
    ],
)
def test_an_origin_that_browsers_spell_otherwise_is_refused_with_their_spelling(origin, sent):
    """Fails when a page is named and yet kept out, and nobody can see why."""
    with pytest.raises(ConfigInvalid, match=f"'{origin}' must be '{sent}'"):
        load_config({"http_allowed_origins": origin}, environ={})
    assert load_config({"http_allowed_origins": sent}, environ={}).gateway.allowed_origins == (sent,)


def test_a_port_that_is_not_the_schemes_own_stays_in_an_origin():
    named = "http://a.example:443,https://a.example:80,https://a.example:8443"
    assert load_config({"http_allowed_origins": named}, environ={}).gateway.allowed_origins == tuple(named.split(","))


def test_the_origins_of_web_pages_are_read_between_commas():
    several = load_config({"http_allowed_origins": "https://a.example, http://localhost:3000,"}, environ={})
    assert several.gateway.allowed_origins == ("https://a.example", "http://localhost:3000")
    with_keys = {"http_allowed_origins": "*", "tenants_file": "t.yaml", "hash_algorithm": "sha256"}
    assert load_config(with_keys, environ={}).gateway.allowed_origins == ("*",)
    assert load_config(environ={}).gateway.allowed_origins == ()


def test_metrics_ports_end_where_ports_end():
    """Fails when a worker is told to listen where no port is."""
    last = 65_535 - METRICS_PORTS
    assert load_config(flags={"metrics_port": last}).store.metrics_port == last
    with pytest.raises(ConfigInvalid, match=f"metrics_port.*must leave {METRICS_PORTS} ports"):
        load_config(flags={"metrics_port": last + 1})
