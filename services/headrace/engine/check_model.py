"""Refuse a model that no worker could serve, before anything is started: what can be told at once, without torch."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from headrace.config import EngineSettings, ModelSettings
from headrace.core.errors import ConfigInvalid, ModelRefused
from headrace.engine.drafter import NGRAM, OFF
from headrace.engine.model_families import check_architecture


def check_model(settings: ModelSettings) -> None:
    """Look at a model's configuration, in its local directory or from the hub: that it is there, can be read and names
    a family that is served. Raises ModelRefused."""
    local = local_directory(settings.model)
    directory = local or hub_directory(settings.model, ("config.json",))
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        family = config.get("model_type", "")
    except (OSError, ValueError, AttributeError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ModelRefused(settings.model, f"its config.json cannot be used: {error}") from error
    if family:  # without one, transformers guesses by the directory's name
        check_architecture(local.resolve().name if local else settings.model, str(family))


def local_directory(model: str) -> Path | None:
    """The directory that a model's name means here; None for what must be a hub id. Raises ModelRefused for a path that
    leads nowhere."""
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    if model.startswith((".", "/", "~")):
        raise ModelRefused(model, "there is no such directory")
    return None


def hub_directory(model: str, wanted: Sequence[str]) -> Path:
    """Where the files of a hub id lie that match, fetched unless they are in the local cache. Raises ModelRefused."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=list(wanted)))
    except (OSError, HFValidationError) as error:  # hub and network errors are OSErrors
        # Its first line: the rest is a paragraph, and a worker's progress is told by lines.
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ModelRefused(
            model,
            f"it is no local directory, and the hub did not give it ({why}); check the name and the network, or give a "
            "directory",
        ) from error


def check_draft_model(model: ModelSettings, engine: EngineSettings) -> None:
    """As `check_model` for the model that `speculation` names; and that its tokens are the model's, where both are
    local directories. Raises ConfigInvalid."""
    if engine.speculation in (OFF, NGRAM):
        return
    try:
        check_model(replace(model, model=engine.speculation))
        draft = local_directory(engine.speculation)
    except ModelRefused as error:
        raise no_draft_model(error) from error
    target = local_directory(model.model)
    if draft is not None and target is not None:
        check_tokens(target.name, target, draft.name, draft)


def check_tokens(target_name: str, target: Path, draft_name: str, draft: Path) -> None:
    """Two models' directories must mean the same by a token id. Raises ConfigInvalid with a token that differs."""
    own, other = (Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab() for path in (target, draft))
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if differing:
        raise ConfigInvalid(
            "speculation",
            f"{draft_name} has other tokens than {target_name}: {len(differing)} have another id or none, as "
            f"{differing[0]!r}; a draft model must share its model's tokenizer",
        )


def no_draft_model(error: ModelRefused) -> ConfigInvalid:
    """What is said of a model that cannot draft."""
    return ConfigInvalid("speculation", f"must be off, ngram or a model; as a model it cannot be used: {error}")
