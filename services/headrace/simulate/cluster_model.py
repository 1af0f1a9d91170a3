"""A cluster as a simulation sees it: how many workers of which kind, how fast, with how much memory, on what network.

Read from a small YAML file, or one of the profiles that ship beside this file. Every number has a unit in its name.
"""

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from headrace.core.errors import InvalidRequest
from headrace.core.step_costs import DecodeCost, LinkCost, PrefillCost


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """Every worker is a host of its own with one GPU. Mixed workers prefill and decode; the others do one of them."""

    name: str
    prefill_workers: int
    decode_workers: int
    mixed_workers: int
    prefill: PrefillCost
    decode: DecodeCost
    network: LinkCost  # of every host, shared by what it sends
    kv_token_bytes: int
    device_tokens: int  # KV that one worker's GPU holds, running sequences included
    host_tokens: int  # KV that one host's memory holds behind it; 0: no pool
    ttft_slo_s: float
    itl_slo_s: float
    # What a file need not say:
    # Where the prompt was computed: 1, the first token is a decode step of its own, as the published studies count it;
    # 0, the prompt's last step gives it, as engines do.
    first_token_steps: int = 1
    prefills_make_way: bool = False  # for a shorter prompt, between two steps, where the order is shortest first
    request_s: float = 0.0  # from a caller to a worker and back, beside all work
    prefill_chunk_tokens: int = 512  # of prompts, in one step: so much longer a decode step lasts beside a prefill
    interference: float = 0.02  # of a prefill's time, lost to each sequence that decodes beside it
    local_prefill_tokens: int = 2_048  # missing ones that a decode worker may compute itself, at most
    moved_share: float = 1.0  # of a prefix's KV, what a hit or a hand-off moves: less where layers have windows
    window_tokens: int = 0  # that layers with a window read; 0: none has one (`windowed_memory.py` has the others)
    near_tokens: int = 0  # of KV in those layers that one worker's GPU holds; `device_tokens` is of the other layers

    @property
    def num_workers(self) -> int:
        """Prefill workers are numbered first, then decode workers, then mixed ones."""
        return self.prefill_workers + self.decode_workers + self.mixed_workers

    @property
    def moved_token_bytes(self) -> float:
        """What a token of a prefix costs on the network, in the mean."""
        return self.kv_token_bytes * self.moved_share

    @property
    def prefillers(self) -> tuple[int, ...]:
        """Workers that take prefills sent by the gateway."""
        first_mixed = self.prefill_workers + self.decode_workers
        return (*range(self.prefill_workers), *range(first_mixed, self.num_workers))

    @property
    def decoders(self) -> tuple[int, ...]:
        """Workers that decode."""
        return tuple(range(self.prefill_workers, self.num_workers))


PROFILES = (
    "h100-8b-pd",
    "h100-8b-pd-pool",
    "h100-8b-mixed",
    "h100-8b-mixed-pool",
    "h100-70b-pd-pool",
    "cpu-135m-mixed",
)


def read_cluster(named: str) -> ClusterModel:
    """A profile by its name, or a YAML file by its path. Raises InvalidRequest naming the field that is wrong."""
    try:
        if named in PROFILES:
            text = resources.files("headrace.simulate").joinpath(f"profiles/{named}.yaml").read_text(encoding="utf-8")
        else:
            text = Path(named).read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
    except OSError as error:
        known = ", ".join(PROFILES)
        raise InvalidRequest(f"{named!r} is no profile ({known}) and no readable file", param="cluster") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InvalidRequest(f"{named} is not YAML: {error}", param="cluster") from error
    if not isinstance(loaded, dict):
        raise InvalidRequest(f"{named} must be a mapping", param="cluster")
    return _parse(named, loaded)


def write_cluster(model: ClusterModel, path: Path, *, remarks: Sequence[str]) -> None:
    """A file that `read_cluster` reads back, with remarks for people at its head."""
    head = "".join(f"# {line}\n" for line in remarks)
    path.write_text(head + yaml.safe_dump(asdict(model), sort_keys=False), encoding="utf-8")


def _parse(named: str, loaded: dict[str, Any]) -> ClusterModel:
    wanted: dict[str, Any] = {field.name: field.type for field in fields(ClusterModel)}
    needed = {field.name for field in fields(ClusterModel) if field.default is MISSING}
    unknown, missing = sorted(set(loaded) - set(wanted)), sorted(needed - set(loaded))
    if unknown or missing:
        raise InvalidRequest(
            f"{named}: unknown {unknown or 'nothing'}, missing {missing or 'nothing'}", param="cluster"
        )
    values: dict[str, Any] = {"name": str(loaded["name"])}
    for name, kind in wanted.items():
        if name == "name" or name not in loaded:
            continue
        if kind in (PrefillCost, DecodeCost, LinkCost):
            values[name] = _parse_costs(named, name, kind, loaded[name])
        else:
            values[name] = kind(_number(named, name, loaded[name]))
    model = ClusterModel(**values)
    if not model.prefillers or not model.decoders:
        raise InvalidRequest(f"{named}: needs workers that prefill and workers that decode", param="cluster")
    return model


def _parse_costs(named: str, name: str, kind: Any, given: Any) -> Any:
    wanted = [field.name for field in fields(kind)]
    if not isinstance(given, dict) or set(given) != set(wanted):
        raise InvalidRequest(f"{named}: {name} must have exactly {', '.join(wanted)}", param="cluster")
    return kind(**{key: _number(named, f"{name}.{key}", given[key]) for key in wanted})


def _number(named: str, name: str, given: Any) -> float:
    """YAML reads 1e9 as text and 1.0e+9 as a number; people write the first."""
    try:
        number = float(given)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{named}: {name} must be a number, not {given!r:.40}", param="cluster") from None
    if not 0 <= number < 1e18:
        raise InvalidRequest(f"{named}: {name} must not be negative or huge", param="cluster")
    return number
