"""Changing the core's limits while it runs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvhold import protocol as wire
from kvhold.core.limits import Limits, Quota

CHANGEABLE = (
    "prepared_share",
    "engine_share",
    "speculative_share",
    "credit_share",
    "lost_share",
    "max_objects",
    "read_bytes",
    "write_queue",
    "write_rate",
)


def change_limits(limits: Limits, values: Mapping[str, float], quotas: Mapping[bytes, tuple[int, int]]) -> Limits:
    """``limits`` with other values. Raises ProtocolError that names what cannot be."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in CHANGEABLE:
            raise wire.ProtocolError(f"unknown limit {name!r} (value {value:g}); use one of: {', '.join(CHANGEABLE)}")
        share = name.endswith("_share")
        least = 1 if name == "max_objects" else 0
        if not least <= value <= (1 if share else 1 << 50):
            wanted = "a share from 0 to 1" if share else f"{least} or more, up to {1 << 50}"
            raise wire.ProtocolError(f"limit {name}={value:.15g} cannot be; give {wanted}")
        changes[name] = value if share else int(value)
    for namespace, (floor, limit) in quotas.items():
        if not 0 <= floor <= limit:
            raise wire.ProtocolError(
                f"quota of {namespace.hex()}: its floor {floor} is not between 0 and its limit {limit}"
            )
    named = {**limits.quotas, **{name: Quota(*pair) for name, pair in quotas.items()}}
    return dataclasses.replace(limits, **changes, quotas={name: q for name, q in named.items() if q != Quota()})


def limits_document(limits: Limits) -> dict[str, Any]:
    """Plain data; a namespace without a limit has None for it."""
    none = Quota().limit
    quotas = {
        name.hex(): {"floor": quota.floor, "limit": None if quota.limit >= none else quota.limit}
        for name, quota in limits.quotas.items()
    }
    return {**{name: getattr(limits, name) for name in CHANGEABLE}, "quotas": quotas}
