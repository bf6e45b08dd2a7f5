"""What a user may set about an engine's half of the cache, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvhold.folders import DEFAULT, VARIABLE, runtime_folders
from kvhold.host import check_dram, check_huge_pages, check_socket, default_dram
from kvhold.units import LEAST_SSD, format_size, parse_directory, parse_size

_WRITTEN = {
    "socket": 'a path like "/run/kvhold/kvhold.sock"',
    "dram": 'a size like "64GiB"',
    "huge_pages": "true or false",
    "ssd": 'a directory and a size like "/var/cache/kvhold:500GiB"',
    "eviction": '"lru" or "2q"',
    "epoch": 'a text like "step-1200"',
    "weights_id": 'a text like "llama-3-70b-instruct@5c1b"',
    "save_decode_cache": "true or false",
    "step_budget_ms": "milliseconds like 1.0",
    "answer_deadline_ms": "milliseconds like 30.0",
    "find_deadline_ms": "milliseconds like 200.0",
    "publish_deadline_ms": "milliseconds like 500.0",
    "read_deadline_ms": "milliseconds like 2000.0",
}
"""For who wrote a wrong type."""


class ManagerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user may set of any engine. ``docs/configuration.md`` says the same, and a test compares the two."""

    socket: str | None = None
    """Attach to the manager on this socket and to no other; without it the engine finds or starts one."""
    dram: str | None = None
    """Arena of the engine's own manager, e.g. ``32GiB``; by default 20% of free memory, at most 8GiB."""
    huge_pages: bool = False
    """Back the engine's own manager's arena with huge pages, which must be there."""
    ssd: str | None = None
    """A directory of the engine's own manager and its size, e.g. ``/var/cache/kvhold:500GiB``; outlives restarts."""
    eviction: Literal["lru", "2q"] = "lru"
    """Which objects the engine's own manager evicts first: ``lru`` those used longest ago, ``2q`` of
    those that were used once, as long as they are half."""
    epoch: str | None = None
    """Whatever stands for the weights' age where their files do not, e.g. ``step-1200``: engines share within one."""
    weights_id: str | None = None
    """A name that stands for the weights in place of their files' names, sizes and times. Others need another."""
    read_deadline_ms: float = 2000.0
    """How long a request may wait for what has to be read from SSD; then what has arrived is restored."""


class Settings(ManagerSettings, frozen=True, forbid_unknown_fields=True):
    """What a user may set of an engine that works in steps."""

    save_decode_cache: bool = False
    """Also keep blocks that were filled by generated tokens, not by the prompt alone."""
    step_budget_ms: float = 1.0
    """How long the scheduler may wait for the manager in one engine step, all requests together."""
    answer_deadline_ms: float | None = None
    """How long any request may be deferred while its question is unanswered; then it is a miss. Without it: half of
    the time that the tokens in question would take to compute, at least 30 and at most 1000."""


S = TypeVar("S", bound=ManagerSettings)


def own_settings(settings: ManagerSettings) -> list[str]:
    """Those that were set of the ones for the engine's own manager."""
    return [
        name
        for name in ("dram", "huge_pages", "ssd", "eviction")
        if getattr(settings, name) != getattr(ManagerSettings(), name)
    ]


def load_settings(given: Mapping[str, Any], where: str, kind: type[S]) -> S:
    """What was ``given`` ``where``, as settings of ``kind``.

    Raises ValueError that names the setting, the value and the remedy. It is raised for what can never work. What may
    be had later, like a manager that nobody has started, is no error.
    """
    known = kind.__struct_fields__
    for name in given:
        if name not in known:
            raise ValueError(
                f"kvhold: {where} has an unknown setting {name!r} (value {given[name]!r}); "
                f"remove it, or use one of: {', '.join(known)}"
            )
    for name, value in given.items():
        try:
            msgspec.convert({name: value}, kind)
        except msgspec.ValidationError:
            raise _wrong(name, value, f"; write {_WRITTEN[name]}") from None
    settings = msgspec.convert(given, kind)
    if settings.socket is not None:
        _check_named(settings.socket, settings)
    else:
        _check_own(settings)
    if settings.weights_id == "":
        raise _wrong("weights_id", "", ", which names no weights; give a text or leave it out")
    for name in (name for name in known if name.endswith("_ms")):
        value, most = getattr(settings, name), 20_000 if name == "read_deadline_ms" else 60_000
        if value is not None and not 0 <= value <= most:
            raise _wrong(name, value, f"; give milliseconds from 0 to {most}")
    return settings


def _wrong(name: str, value: object, why: str) -> ValueError:
    return ValueError(f"kvhold: setting {name!r} has the value {value!r}{why}")


def _check_named(socket: str, settings: ManagerSettings) -> None:
    """Check what goes with the manager on ``socket``."""
    try:
        check_socket(Path(socket))
    except ValueError as error:
        raise _wrong("socket", socket, f", which is {error}") from None
    if own_settings(settings):
        raise ValueError(
            "kvhold: settings 'dram', 'huge_pages', 'ssd' and 'eviction' are for the engine's own manager and cannot "
            f"go with 'socket' ({socket!r}); give them to `kvhold serve` instead"
        )


def _check_own(settings: ManagerSettings) -> None:
    """Check what the engine would start its own manager with."""
    path = runtime_folders()[0] / DEFAULT  # an own manager's is longer, but may not be needed
    try:
        check_socket(path)
    except ValueError as error:
        raise ValueError(f"kvhold: no manager can listen on {str(path)!r}, which is {error} with {VARIABLE}") from None
    dram = default_dram()
    if settings.dram is not None:
        try:
            dram = parse_size(settings.dram)
        except ValueError as error:
            raise ValueError(f"kvhold: setting 'dram': {error}") from None
        try:
            check_dram(dram, settings.huge_pages)
        except ValueError as error:
            raise _wrong("dram", settings.dram, f", which is {error}") from None
    if settings.huge_pages:
        try:
            check_huge_pages(dram)
        except ValueError as error:
            raise _wrong("huge_pages", True, f": {error}") from None
    if settings.ssd is not None:
        try:
            parse_directory(settings.ssd)
        except ValueError:
            raise _wrong(
                "ssd",
                settings.ssd,
                f"; give an absolute path and a size of at least {format_size(LEAST_SSD)}, "
                "e.g. '/var/cache/kvhold:500GiB'",
            ) from None
