"""The connector's settings: ``kv_connector_extra_config`` in vLLM's ``--kv-transfer-config``."""

from pathlib import Path
from typing import Any

import msgspec

from kvhold.units import LEAST_SSD, format_size, parse_size


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user may set. ``docs/configuration.md`` says the same, and a test compares the two."""

    socket: str | None = None
    """Attach to the manager on this socket and to no other; without it the engine finds or starts one."""
    dram: str | None = None
    """Arena of the engine's own manager, e.g. ``32GiB``; by default 20% of free memory, at most 8GiB."""
    huge_pages: bool = False
    """Back the engine's own manager's arena with huge pages, which must be there."""
    ssd: str | None = None
    """A directory of the engine's own manager and its size, e.g. ``/var/cache/kvhold:500GiB``; outlives restarts."""
    epoch: str | None = None
    """Whatever stands for the weights' age where their files do not, e.g. ``step-1200``: engines share within one."""
    save_decode_cache: bool = False
    """Also keep blocks that were filled by generated tokens, not by the prompt alone."""
    step_budget_ms: float = 1.0
    """How long the scheduler may wait for the manager in one engine step, all requests together."""
    answer_deadline_ms: float = 30.0
    """How long a request may be deferred while its question is unanswered; then it is a miss."""
    read_deadline_ms: float = 3000.0
    """The same while the manager reads what was asked for from SSD. It answers by itself after two seconds."""


def load_settings(extra: dict[str, Any]) -> Settings:
    """``extra`` as settings. Raises ValueError that names the setting, the value and the remedy."""
    known = Settings.__struct_fields__
    for name in extra:
        if name not in known:
            raise ValueError(
                f"kvhold: kv_connector_extra_config has an unknown setting {name!r} (value {extra[name]!r}); "
                f"remove it, or use one of: {', '.join(known)}"
            )
    for name, value in extra.items():
        try:
            msgspec.convert({name: value}, Settings)
        except msgspec.ValidationError as error:
            reason = str(error).split(" - at")[0]
            raise ValueError(f"kvhold: setting {name!r} has the value {value!r}: {reason}; correct it") from None
    settings = msgspec.convert(extra, Settings)
    if settings.socket is not None and not Path(settings.socket).is_absolute():
        raise ValueError(f"kvhold: setting 'socket' has the value {settings.socket!r}; give an absolute path")
    if settings.socket is not None and (settings.dram is not None or settings.huge_pages or settings.ssd is not None):
        raise ValueError(
            "kvhold: settings 'dram', 'huge_pages' and 'ssd' are for the engine's own manager and cannot go with "
            f"'socket' ({settings.socket!r}); give them to `kvhold serve` instead"
        )
    if settings.dram is not None:
        try:
            parse_size(settings.dram)
        except ValueError as error:
            raise ValueError(f"kvhold: setting 'dram': {error}") from None
    if settings.ssd is not None:
        path, _, size = settings.ssd.rpartition(":")
        try:
            enough = parse_size(size) >= LEAST_SSD
        except ValueError:
            enough = False
        if not enough or not Path(path).is_absolute():
            raise ValueError(
                f"kvhold: setting 'ssd' has the value {settings.ssd!r}; give an absolute path and a size of at least "
                f"{format_size(LEAST_SSD)}, e.g. '/var/cache/kvhold:500GiB'"
            )
    for name in ("step_budget_ms", "answer_deadline_ms", "read_deadline_ms"):
        if not 0 <= getattr(settings, name) <= 60_000:
            raise ValueError(
                f"kvhold: setting {name!r} has the value {getattr(settings, name)!r}; give milliseconds from 0 to 60000"
            )
    return settings
