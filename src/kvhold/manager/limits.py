"""Changing the core's limits while it runs: which changes are allowed, and what the operator is told."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvhold import protocol as wire
from kvhold.core.arena import ALIGN
from kvhold.core.catalogue import Catalogue
from kvhold.core.limits import Limits, Quota
from kvhold.units import LEAST_WRITE_RATE, exact_size, format_size

CHANGEABLE = (
    "prepared_share",
    "engine_share",
    "credit_share",
    "lost_share",
    "max_objects",
    "read_bytes",
    "write_queue",
    "write_rate",
)
_RESTORES = ("prepared_share", "engine_share")
"""Shares that must have room for an object, or nothing can be restored."""
_SIZES = ("read_bytes", "write_rate")
_LEAST = {"max_objects": 1, "read_bytes": 1, "write_queue": 1}
"""With 0 of these nothing would be kept, read from SSD or written there."""
_MOST = 1 << 50
_QUOTAS = 1024
"""Namespaces that have one."""


def change_limits(
    limits: Limits,
    values: Mapping[str, float],
    quotas: Mapping[bytes, tuple[int, int]],
    arena: int,
    objects: Mapping[bytes, int],
) -> Limits:
    """``limits`` with other values. Raises ProtocolError that names what cannot be.

    ``arena`` bytes are there, and ``objects`` are the bytes of each namespace's largest object: what has no room for
    that switches kvhold off.
    """
    changes: dict[str, Any] = {}
    largest = max((size for size in objects.values() if size <= arena), default=ALIGN)
    for name, value in values.items():
        if name not in CHANGEABLE:
            raise wire.ProtocolError(f"unknown limit {name!r} (value {value:g}); use one of: {', '.join(CHANGEABLE)}")
        _check(name, value, arena, largest)
        changes[name] = value if name.endswith("_share") else int(value)
    if (count := len(limits.quotas.keys() | quotas.keys())) > _QUOTAS:
        raise wire.ProtocolError(
            f"quotas of {count} namespaces are more than {_QUOTAS}; take some away with a floor of 0 and no limit"
        )
    named = {**limits.quotas, **{name: Quota(*pair) for name, pair in quotas.items()}}
    floors = sum(quota.floor for quota in named.values())
    for namespace in quotas:
        quota = named[namespace]
        _check_quota(namespace, quota, floors - quota.floor, arena, objects.get(namespace, ALIGN))
    return dataclasses.replace(limits, **changes, quotas={name: q for name, q in named.items() if q != Quota()})


def object_bytes(catalogue: Catalogue) -> dict[bytes, int]:
    """The bytes of each namespace's largest object."""
    return {
        name: max(index.size for index in namespace.indexes.values())
        for name, namespace in catalogue.namespaces.items()
    }


def limits_document(limits: Limits) -> dict[str, Any]:
    """Plain data; a namespace without a limit has None for it."""
    return {
        **{name: getattr(limits, name) for name in CHANGEABLE},
        "quotas": {name.hex(): _plain(quota) for name, quota in limits.quotas.items()},
    }


def changes_document(before: Limits, after: Limits) -> dict[str, Any]:
    """What of :func:`limits_document` is not as it was: what it is now. Empty if nothing has changed."""
    changed: dict[str, Any] = {
        name: getattr(after, name) for name in CHANGEABLE if getattr(after, name) != getattr(before, name)
    }
    names = [*after.quotas, *(name for name in before.quotas if name not in after.quotas)]
    found = {name: after.quotas.get(name, Quota()) for name in names}
    quotas = {name.hex(): _plain(quota) for name, quota in found.items() if quota != before.quotas.get(name, Quota())}
    return {**changed, **({"quotas": quotas} if quotas else {})}


def _plain(quota: Quota) -> dict[str, int | None]:
    return {"floor": quota.floor, "limit": None if quota.limit >= Quota().limit else quota.limit}


def _check(name: str, value: float, arena: int, largest: int) -> None:
    if name.endswith("_share"):
        if not 0 <= value <= 1:
            raise wire.ProtocolError(f"limit {name}={value:.15g} cannot be; give a share from 0 to 1")
        if name in _RESTORES and value * arena < largest:
            raise wire.ProtocolError(
                f"limit {name}={value:.15g} would restore nothing: an object has {format_size(largest)}, the arena "
                f"{format_size(arena)}; give {_rounded_up(largest / arena)} or more"
            )
        return
    least, is_size = _LEAST.get(name, 0), name in _SIZES
    if not least <= value <= _MOST:
        given, most = f"{value:.15g}", format_size(_MOST) if is_size else _MOST
        raise wire.ProtocolError(f"limit {name}={given} cannot be; give {least} or more, up to {most}")
    if name == "write_rate" and 0 < value < LEAST_WRITE_RATE:
        raise wire.ProtocolError(
            f"limit {name}={format_size(int(value))} a second would write next to nothing; give "
            f"{format_size(LEAST_WRITE_RATE)} or more, or 0 for no limit"
        )


def _check_quota(namespace: bytes, quota: Quota, others: int, arena: int, largest: int) -> None:
    """``others`` are the floors of all other namespaces."""
    floor, limit, name = format_size(quota.floor), format_size(quota.limit), namespace.hex()
    if not 0 <= quota.floor <= quota.limit:
        raise wire.ProtocolError(
            f"quota of {name}: its floor of {floor} is not between 0 and its limit of {limit}; lower the floor or "
            "raise the limit"
        )
    if quota.floor + others > arena:
        left = exact_size(max(0, arena - others))
        besides = f", of which others' floors take {format_size(others)}" if others else ""
        raise wire.ProtocolError(
            f"quota of {name}: its floor of {floor} cannot be kept: the arena has {format_size(arena)}{besides}; "
            f"give at most {left}"
        )
    if quota.limit < largest:
        raise wire.ProtocolError(
            f"quota of {name}: its limit of {limit} has no room for an object; give {exact_size(largest)} or more"
        )


def _rounded_up(share: float) -> str:
    """Two digits, no less than ``share``."""
    step = 10.0 ** (math.floor(math.log10(share)) - 1)
    return f"{math.ceil(share / step) * step:.2g}"
