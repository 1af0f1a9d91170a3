"""One table of settings, one parse into frozen pieces.

A setting's name is its YAML key; `HEADRACE_` + upper case is its environment variable; `--kebab-case` its flag. Flags
win over the environment, which wins over the file, which wins over the default. Unknown keys are refused.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from headrace.core.block import HashAlgorithm
from headrace.core.draft_limits import DRAFT_TOKENS_MAX
from headrace.core.errors import ConfigInvalid
from headrace.core.eviction import DEFAULT_POLICY, PolicyName
from headrace.core.limits import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN
from headrace.core.overtake_limits import OVERTAKE_ROUND_TRIP_MIN_MS
from headrace.core.telemetry_limits import METRICS_PORTS

DEFAULT_MODEL = "smollm2-135m-instruct"
STORE_CODECS = ("raw", "int8", "fp8")
ATTENTION_BACKENDS = ("auto", "gather", "flex")
POOL_CODECS = {"raw": "raw", "int8": "int8_token", "fp8": "fp8_token"}  # setting -> KvLayout.codec


def setting(default: Any, help: str) -> Any:
    """One row of the table: a default (which gives the type) and a line of help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, in which numbers, where."""

    model: str = setting(DEFAULT_MODEL, "Model: the built-in name, a local directory, or a hub id.")
    model_cache_dir: str = setting("", "Where converted weights are kept. Default: ~/.cache/headrace/models.")
    dtype: str = setting("auto", "auto (the checkpoint's), bfloat16, float16 or float32.")
    device: str = setting("auto", "auto (cuda when present), cpu or cuda.")
    exact: bool = setting(True, "Exact mode: logits do not depend on chunking, batch or cache. CPU only.")
    attention_backend: str = setting(
        "auto",
        "How attention reads KV: gather (what exact mode needs), flex (FlexAttention, pages in place; needs exact: "
        "false), or auto (flex on CUDA where exact is false; docs/engine.md).",
    )
    torch_threads: int = setting(0, "Threads per worker for torch. 0: all cores of the host, at most 4.")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of one worker's engine."""

    block_tokens: int = setting(64, "Tokens in one KV block, for hashing and transfer.")
    pool_tokens: int = setting(32_768, "Tokens of KV that one worker's own pool holds.")
    prefill_chunk_tokens: int = setting(256, "Prompt tokens computed in one step, at most.")
    batch_sequences_max: int = setting(16, "Sequences decoded together in one step, at most.")
    store_codec: str = setting(
        "raw", "KV in the store and on the wire: raw, int8 or fp8; the latter two lose exactness (docs/codecs.md)."
    )
    pool_codec: str = setting(
        "raw", "KV in the workers' own pools: raw, int8 or fp8; the store then keeps the pool's bytes (docs/codecs.md)."
    )
    load_patience_ms: int = setting(
        OVERTAKE_ROUND_TRIP_MIN_MS,
        "A cached prefix may always take this long to arrive, however fast computing it is (docs/routing-live.md).",
    )
    context_tokens_max: int = setting(0, "Longest prompt plus output. 0: the model's own limit.")
    speculation: str = setting(
        "off", "Drafts of tokens: off, ngram (looked up in the sequence itself) or a small model's directory or hub id."
    )
    draft_tokens: int = setting(7, "Tokens of one draft, at most (docs/speculation.md).")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One store node."""

    node_id: str = setting("", "Stable name of this host's store node. Default: the host name.")
    arena_mb: int = setting(2_048, "Shared memory for the host tier, in MiB.")
    eviction_policy: str = setting(
        DEFAULT_POLICY.value, "What leaves a full arena: adaptive, lru, gdsf, lfu or arc (docs/eviction.md)."
    )
    free_share: float = setting(
        0.01, "Share of the arena that is kept free ahead of need, by eviction in the background. 0: none."
    )
    pin_share: float = setting(0.5, "Share of the arena that pinned prefixes may take; a pin beyond it is refused.")
    arena_dir: str = setting("/dev/shm", "Directory of the arena file; a memory-backed file system.")
    disk_gb: float = setting(0.0, "Disk for what the arena has no room for, in GiB. 0: no disk tier.")
    disk_dir: str = setting("", "Directory of the disk tier. Default: ~/.cache/headrace/blocks.")
    store_host: str = setting("127.0.0.1", "Address on which the store node serves gRPC. On Ray, auto: its node's own.")
    store_port: int = setting(0, "Port of the store node. 0: any free one.")
    metrics_port: int = setting(
        0, "Port of a store node's metrics; workers and gateways of its host take the next free ones. 0: any free ones."
    )
    kv_events_endpoint: str = setting(
        "", "ZeroMQ endpoint of KV events, as tcp://127.0.0.1:5557. Empty: none are sent."
    )
    kv_events_replay_endpoint: str = setting("", "ZeroMQ endpoint for replays of KV events. Empty: no replays.")
    kv_events_topic: str = setting("", "Topic of KV events; llm-d reads kv@<pod>@<model>. Default: kv@<node id>.")
    kv_events_layout: str = setting("map", "Layout of one KV event: map (vLLM from 0.24 on) or array (up to 0.23).")
    kv_events_hashes: str = setting(
        "int", "Block hashes in KV events: int (the last 8 bytes; vLLM's default) or bytes."
    )


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The index."""

    redis_url: str = setting(
        "", "redis://, redis+sentinel:// or redis+cluster:// URL; rediss: with TLS. Empty: an embedded Valkey server."
    )


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Who may listen to what, and how (docs/tls.md)."""

    tls_cert_file: str = setting(
        "", "Certificate (PEM) that every process shows; it names the hosts. Read again when it changes (docs/tls.md)."
    )
    tls_key_file: str = setting("", "Private key (PEM) of that certificate.")
    tls_ca_file: str = setting(
        "", "Authorities (PEM) that our own processes accept each other's certificates of; a client's, the gateway's."
    )
    tls_client_ca_file: str = setting(
        "", "Authorities (PEM) of which callers of the APIs must show a certificate, beside their key. Empty: none."
    )
    insecure_network: bool = setting(
        False, "Allow listening beyond loopback without TLS between the parts, or without keys (tenants_file)."
    )


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The front door and its routing."""

    http_host: str = setting("127.0.0.1", "Address of the OpenAI-compatible HTTP API, and of the gRPC API.")
    http_port: int = setting(8000, "Port of the HTTP API. 0: any free one.")
    grpc_port: int = setting(9000, "Port of the gRPC API. 0: any free one.")
    http_allowed_origins: str = setting(
        "",
        "Web pages that browsers let use the HTTP API: origins as https://chat.example, between commas.",
    )
    local_prefill_tokens: int = setting(
        256, "A decode worker never computes more missing prompt tokens itself while a prefill worker can. GPU: 2048."
    )
    shed_ttft_ms: int = setting(
        0, "Refuse a request at once (503) when its first token would come later than this. 0: never."
    )
    ttft_slo_ms: int = setting(0, "A good request has its first token within this (docs/load.md). 0: no target.")
    itl_slo_ms: int = setting(0, "A good request has at most this mean gap between its tokens. 0: no target.")
    hash_algorithm: str = setting("xxh3-128", "xxh3-128, or sha256 where callers do not trust each other.")
    trust_group: str = setting("default", "Callers of this deployment share blocks within this group.")
    tenants_file: str = setting("", "YAML file of API keys, tenants and trust groups. Empty: everybody is one tenant.")

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The origins of `http_allowed_origins`."""
        return tuple(origin.strip() for origin in self.http_allowed_origins.split(",") if origin.strip())


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How many of what, and where running state is kept."""

    gateways: int = setting(
        1, "Gateways, on Ray. They give the same answers; limits are each one's own (docs/load.md)."
    )
    prefill_workers: int = setting(1, "Prefill workers.")
    decode_workers: int = setting(2, "Decode workers.")
    prefill_workers_max: int = setting(0, "Up to so many prefill workers under load, on Ray. 0: always as many.")
    decode_workers_max: int = setting(0, "Up to so many decode workers under load, on Ray. 0: always as many.")
    state_dir: str = setting("", "Where a running system keeps its state and logs. Default: ~/.local/state/headrace.")

    @property
    def state_path(self) -> Path:
        """The state directory that is meant."""
        return Path(self.state_dir).expanduser() if self.state_dir else Path.home() / ".local" / "state" / "headrace"


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What all parts tell of themselves."""

    otlp_endpoint: str = setting(
        "", "OpenTelemetry collector that gets traces, as http://127.0.0.1:4317 (OTLP over gRPC). Empty: no traces."
    )
    log_format: str = setting("text", "Log lines of all parts: text, or json with one object a line.")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Pieces are handed to the parts that read them; nobody reads the environment later."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    index: IndexSettings = IndexSettings()
    network: NetworkSettings = NetworkSettings()
    gateway: GatewaySettings = GatewaySettings()
    cluster: ClusterSettings = ClusterSettings()
    telemetry: TelemetrySettings = TelemetrySettings()


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> Config:
    """Merge file, environment and flags into a checked Config. Raises ConfigInvalid naming the key."""
    table = settings_table()
    values: dict[str, Any] = {}
    for source in (_read_file(config_file), _read_environ(os.environ if environ is None else environ), flags or {}):
        for key, value in source.items():
            if key not in table:
                raise ConfigInvalid(key, f"unknown; known settings: {', '.join(sorted(table))}")
            if value is not None:
                values[key] = _convert(key, value, table[key][1].default)
    pieces = {}
    for piece in fields(Config):
        piece_type: Any = piece.type
        names = {f.name for f in fields(piece_type)}
        pieces[piece.name] = piece_type(**{k: v for k, v in values.items() if k in names})
    config = Config(**pieces)
    _check(config)
    return config


def settings_table() -> dict[str, tuple[str, Field[Any]]]:
    """Every setting: name -> (piece name, dataclass field with default and help). Drives docs, flags and tests."""
    table: dict[str, tuple[str, Field[Any]]] = {}
    for piece in fields(Config):
        piece_type: Any = piece.type
        for row in fields(piece_type):
            assert row.name not in table, f"setting {row.name} is defined twice"
            table[row.name] = (piece.name, row)
    return table


def settings_markdown() -> str:
    """The table of docs/configuration.md: one row a setting, in the order of the pieces."""
    lines = ["| setting (YAML) | environment | flag | default | what it does |", "|---|---|---|---|---|"]
    for name, (_, row) in settings_table().items():
        flag, default = f"--{name.replace('_', '-')}", f"`{row.default}`" if row.default != "" else ""
        lines.append(f"| `{name}` | `HEADRACE_{name.upper()}` | `{flag}` | {default} | {row.metadata['help']} |")
    return "\n".join(lines) + "\n"


def setting_sources(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
) -> dict[str, str]:
    """Where `load_config` with the same arguments takes each setting from: flag, environment, file or default."""
    sources = dict.fromkeys(settings_table(), "default")
    sources |= {key: f"file {config_file}" for key, value in _read_file(config_file).items() if value is not None}
    named = _read_environ(os.environ if environ is None else environ)
    sources |= {key: f"environment HEADRACE_{key.upper()}" for key in named}
    return sources | {key: "flag" for key, value in (flags or {}).items() if value is not None}


def config_to_flat(config: Config) -> dict[str, Any]:
    """The inverse of parsing: setting name -> value, for handing a Config to another process."""
    return {name: getattr(getattr(config, piece), name) for name, (piece, _) in settings_table().items()}


def _read_file(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid("config", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        # Where, and never what: a parser's message quotes the line, and so what may be a password.
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigInvalid("config", f"{path} cannot be read as YAML{where}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigInvalid("config", f"{path} must be a mapping of setting names to values")
    return {str(key): value for key, value in loaded.items()}


def _read_environ(environ: Mapping[str, str]) -> dict[str, str]:
    known = settings_table()
    named = {name: f"HEADRACE_{name.upper()}" for name in known}
    return {name: environ[variable] for name, variable in named.items() if variable in environ}


KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _convert(key: str, value: Any, default: Any) -> Any:
    """Read a value as the default's type; text is accepted for every type, nothing else is coerced."""
    kind = type(default)
    if isinstance(value, str) and kind is not str:
        text = value.strip().lower()
        try:
            if kind is bool:
                return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text]
            return kind(text)
        except (ValueError, KeyError):
            raise ConfigInvalid(key, f"{value!r} is not {KIND_NAMES[kind]}") from None
    if kind is float and type(value) is int:
        return float(value)
    if kind is not type(value):
        raise ConfigInvalid(key, f"{value!r} is not {KIND_NAMES[kind]}")
    return value


def _check(config: Config) -> None:
    """Refuse what cannot work, before anything starts."""
    _check_engine(config.engine)
    _check_store(config.store)
    _check_ports(config)
    _check_gateway(config.gateway)
    _check_cluster(config.cluster)
    if config.telemetry.otlp_endpoint and not config.telemetry.otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigInvalid("otlp_endpoint", "must begin with http:// or https://, as in http://127.0.0.1:4317")
    if config.telemetry.log_format not in ("text", "json"):
        raise ConfigInvalid("log_format", "must be text or json")
    if config.model.dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigInvalid("dtype", "must be auto, bfloat16, float16 or float32")
    if config.model.device not in ("auto", "cpu", "cuda"):
        raise ConfigInvalid("device", "must be auto, cpu or cuda")
    _check_attention(config)


def _check_engine(engine: EngineSettings) -> None:
    if not BLOCK_TOKENS_MIN <= engine.block_tokens <= BLOCK_TOKENS_MAX:
        raise ConfigInvalid("block_tokens", f"must lie in {BLOCK_TOKENS_MIN}..{BLOCK_TOKENS_MAX}")
    if engine.pool_tokens < 2 * engine.block_tokens:
        raise ConfigInvalid("pool_tokens", "must hold at least two blocks")
    for key in ("prefill_chunk_tokens", "batch_sequences_max", "load_patience_ms"):
        if getattr(engine, key) < 1:
            raise ConfigInvalid(key, "must be at least 1")
    if not 1 <= engine.draft_tokens <= DRAFT_TOKENS_MAX:
        raise ConfigInvalid("draft_tokens", f"must lie in 1..{DRAFT_TOKENS_MAX}; speculation: off switches drafts off")
    if engine.context_tokens_max and engine.block_tokens > engine.context_tokens_max:
        raise ConfigInvalid("block_tokens", "must not exceed context_tokens_max")
    if engine.store_codec not in STORE_CODECS:
        raise ConfigInvalid("store_codec", f"must be one of {', '.join(STORE_CODECS)}")
    if engine.pool_codec not in POOL_CODECS:
        raise ConfigInvalid("pool_codec", f"must be one of {', '.join(POOL_CODECS)}")
    if engine.pool_codec != "raw" and engine.store_codec != "raw":
        raise ConfigInvalid("store_codec", "must be raw with a pool_codec: the store keeps what the pool has, as it is")


def _check_store(store: StoreSettings) -> None:
    if store.arena_mb < 1:
        raise ConfigInvalid("arena_mb", "must be at least 1")
    if not 0 <= store.free_share <= 0.5:
        raise ConfigInvalid("free_share", "must lie in 0..0.5: more would keep half of the arena empty")
    if not 0 <= store.pin_share <= 0.9:
        raise ConfigInvalid("pin_share", "must lie in 0..0.9: what is not pinned must be able to turn over")
    if store.eviction_policy not in tuple(PolicyName):
        raise ConfigInvalid("eviction_policy", f"must be one of {', '.join(PolicyName)}")
    if store.kv_events_replay_endpoint and not store.kv_events_endpoint:
        raise ConfigInvalid("kv_events_replay_endpoint", "needs kv_events_endpoint: there is nothing to replay")
    if store.kv_events_layout not in ("map", "array"):
        raise ConfigInvalid("kv_events_layout", "must be map or array")
    if store.kv_events_hashes not in ("int", "bytes"):
        raise ConfigInvalid("kv_events_hashes", "must be int or bytes")
    if not 0 <= store.disk_gb < math.inf:
        raise ConfigInvalid("disk_gb", "must be a size in GiB, or 0")


def _check_ports(config: Config) -> None:
    for key, port in (
        ("store_port", config.store.store_port),
        ("metrics_port", config.store.metrics_port),
        ("http_port", config.gateway.http_port),
        ("grpc_port", config.gateway.grpc_port),
    ):
        if not 0 <= port <= 65_535:
            raise ConfigInvalid(key, "must lie in 0..65535")
    if config.store.metrics_port > 65_535 - METRICS_PORTS:
        raise ConfigInvalid("metrics_port", f"must leave {METRICS_PORTS} ports above it for workers and gateways")


def _check_gateway(gateway: GatewaySettings) -> None:
    for key in ("shed_ttft_ms", "ttft_slo_ms", "itl_slo_ms"):
        if getattr(gateway, key) < 0:
            raise ConfigInvalid(key, "must not be negative; 0 switches it off")
    if gateway.hash_algorithm not in set(HashAlgorithm):
        raise ConfigInvalid("hash_algorithm", f"must be one of {', '.join(HashAlgorithm)}")
    for origin in gateway.allowed_origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/?#@\s*]+", origin, re.IGNORECASE):
            raise ConfigInvalid("http_allowed_origins", f"{origin!r} is no origin, as https://chat.example:8443 is")
        if origin != (sent := _as_browsers_send(origin)):
            raise ConfigInvalid("http_allowed_origins", f"{origin!r} must be {sent!r}, which is what browsers send")
        if origin == "*" and not gateway.tenants_file:
            raise ConfigInvalid("http_allowed_origins", "must not be * without a tenants_file: every page could ask")
    if gateway.tenants_file and gateway.hash_algorithm != HashAlgorithm.SHA256:
        raise ConfigInvalid("hash_algorithm", "must be sha256 with a tenants_file: tenants might construct collisions")


def _as_browsers_send(origin: str) -> str:
    """In lower case, without the port that its scheme has anyway."""
    origin = origin.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")


def _check_cluster(cluster: ClusterSettings) -> None:
    for key in ("gateways", "decode_workers"):
        if getattr(cluster, key) < 1:
            raise ConfigInvalid(key, "must be at least 1")
    if cluster.prefill_workers < 0:
        raise ConfigInvalid("prefill_workers", "must not be negative")
    for key, fixed in (
        ("prefill_workers_max", cluster.prefill_workers),
        ("decode_workers_max", cluster.decode_workers),
    ):
        most = getattr(cluster, key)
        if most and (most < fixed or not fixed):
            raise ConfigInvalid(key, f"must be 0 or at least {key.removesuffix('_max')}, of which there must be one")


def _check_attention(config: Config) -> None:
    if config.model.attention_backend not in ATTENTION_BACKENDS:
        raise ConfigInvalid("attention_backend", f"must be one of {', '.join(ATTENTION_BACKENDS)}")
    if config.model.attention_backend != "flex":
        return
    if config.model.exact:
        raise ConfigInvalid(
            "attention_backend",
            "flex gives a row other bits in another batch: set exact to false with it, or use gather",
        )
    if config.engine.pool_codec != "raw":
        raise ConfigInvalid("attention_backend", "flex reads numbers, not codes: set pool_codec to raw, or use gather")
