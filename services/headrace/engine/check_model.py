"""Refuse a model that no worker could serve, before anything is started: what can be told at once, without torch."""

import json
from pathlib import Path

from headrace.config import ModelSettings
from headrace.core.errors import ModelRefused
from headrace.engine.model_families import check_architecture


def check_model(settings: ModelSettings) -> None:
    """Look at a model in a local directory: that it is there, its configuration can be read and names a family that is
    served. Of a hub id nothing is asked, since that takes the network. Raises ModelRefused."""
    directory = local_directory(settings.model)
    if directory is None:
        return
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        family = config.get("model_type", "")
    except (OSError, ValueError, AttributeError) as error:  # a UnicodeDecodeError is a ValueError
        raise ModelRefused(settings.model, f"its config.json cannot be used: {error}") from error
    if family:  # without one, transformers guesses by the directory's name
        check_architecture(directory.resolve().name, str(family))


def local_directory(model: str) -> Path | None:
    """The directory that a model's name means here; None for what must be a hub id. Raises ModelRefused for a path that
    leads nowhere."""
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    if model.startswith((".", "/", "~")):
        raise ModelRefused(model, "there is no such directory")
    return None
