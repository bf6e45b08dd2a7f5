"""What of a model's configuration decides its KV, and where its files are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_FIXED_POSITIONS = {"default", "linear", "llama3", "yarn", "mrope"}
"""Rope types that depend on the model's configuration alone."""


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration, as transformers has it in a dictionary, without what says nothing about its KV."""
    told = json.dumps({k: v for k, v in config.items() if k not in _NOT_OF_THE_MODEL}, default=repr)
    plain: dict[str, Any] = json.loads(told)
    return plain


def positions(config: Mapping[str, Any], longest: int) -> str:
    """``longest``, the context length in tokens, where the position encodings derive from it; "" where they do not.

    ``config`` is the configuration of the model's language part.
    """
    scalings = [config.get("rope_parameters") or {}, config.get("rope_scaling") or {}]
    scalings += [inner for scaling in scalings for inner in scaling.values() if isinstance(inner, dict)]
    kinds = {scaling.get("rope_type", scaling.get("type", "default")) for scaling in scalings}
    return "" if kinds <= _FIXED_POSITIONS else str(longest)


def model_folder(name: str, revision: str | None, cache: str | None = None) -> Path | None:
    """Where the files of a model are that is a folder, or is cached from the hub; None where they are not here.

    ``cache`` is where the engine has them downloaded to, if that is not the hub library's own folder.
    """
    return Path(name) if Path(name).is_dir() else _snapshot(name, revision, cache)


def _snapshot(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder of a hub model's files, where they are cached."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever the hub library says, the answer is that we do not know
        return None
