"""What a manager says about itself: one document for ``kvhold status``, the metrics and the tests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING, Any

from kvhold import __version__
from kvhold.core.catalogue import Catalogue
from kvhold.core.indexes import Index
from kvhold.core.turns import Work
from kvhold.manager.clients import MAX_CLIENTS, OPERATORS, STRANGERS
from kvhold.manager.connection import Connection, Stage
from kvhold.manager.limits import limits_document

if TYPE_CHECKING:
    from kvhold.manager.server import Server


_ROLES = {"admin": "operators"}
SPACES = 256
"""Spaces that are told of, those that were used last, beside how many there are."""
_LOOK, _TOLD = 1024, 64
"""Spaces that are compared, and those that are told of, without a pause."""


def _ago(then: int | None, now: int) -> float | None:
    """Seconds since ``then``; None if that was never."""
    return None if then is None else max(0, now - then) / 1e9


def tell_spaces(catalogue: Catalogue, namespace: bytes, told: list[dict[str, Any]]) -> Work:
    """Adds to ``told`` what is stored for each (namespace, group), and how often what was asked for was there.

    ``idle_seconds`` ago any of it was stored or used last, ``oldest_seconds`` ago what DRAM will evict next of it.
    """
    owner = catalogue.namespaces.get(namespace)
    known = list(catalogue.indexes.values()) if not namespace else list(owner.indexes.values()) if owner else []
    latest: list[Index] = []  # that were used last
    for start in range(0, len(known), _LOOK):
        some = [*latest, *known[start : start + _LOOK]]
        latest = nlargest(SPACES, some, key=lambda index: -1 if index.used_at is None else index.used_at)
        yield []
    latest.sort(key=lambda index: index.id)
    for start in range(0, len(latest), _TOLD):
        told += _spaces(catalogue, latest[start : start + _TOLD])
        yield []


def _spaces(catalogue: Catalogue, indexes: Sequence[Index]) -> list[dict[str, Any]]:
    now = time.monotonic_ns()
    return [
        {
            "namespace": index.namespace.name.hex(),
            "model": index.namespace.label,
            "group": index.group,
            "objects": len(index),
            "object_bytes": index.size,
            "dram_bytes": index.slots * index.size,
            "users": index.users,
            "keys_asked": index.asked,
            "keys_found": index.found,
            "keys_read": index.read,
            "idle_seconds": _ago(index.used_at, now),
            "oldest_seconds": _ago(used, now),
        }
        for index, used in zip(indexes, catalogue.used_before(indexes), strict=True)
    ]


def _clients(connections: Iterable[Connection]) -> dict[str, dict[str, int]]:
    """How many of each kind are connected, and how many may be. One that is lost counts until its process has ended."""
    kinds = Counter("strangers" if not each.role else _ROLES.get(each.role, "engines") for each in connections)
    limits = {"engines": MAX_CLIENTS, "operators": OPERATORS, "strangers": STRANGERS}
    return {kind: {"connected": kinds[kind], "limit": limit} for kind, limit in limits.items()}


def report(server: Server, spaces: list[dict[str, Any]]) -> dict[str, Any]:
    """Plain data; sizes in bytes. ``accounts`` sum to ``arena.populated``. ``spaces`` are of :func:`tell_spaces`."""
    core, now = server.core, time.monotonic_ns()
    return {
        "version": __version__,
        "incarnation": server.sessions.incarnation,
        "socket": str(server.listener.path),
        "embedded": server.config.starter_fd is not None,
        "uptime_seconds": time.monotonic() - server.started,
        "arena": {"bytes": server.memory.bytes, "populated": core.arena.total, "page": server.memory.page},
        "eviction": server.config.eviction,
        "accounts": core.accounts(),
        "limits": limits_document(core.common.limits),
        "logs": [
            {
                "log": number,
                **backing.report(now),
                **(server.stores.opened[number].report() if number in server.stores.opened else {}),
            }
            for number, backing in core.storage.backings.items()
            if backing.kind == "log"
        ],
        "stores": [
            {"store": number, "kind": backing.kind, **backing.report(now)}
            for number, backing in core.storage.backings.items()
            if backing.kind != "log"
        ],
        "kept": {
            kind: {"backings": number, "backed_objects": kept} for kind, (number, kept) in core.storage.kept().items()
        },
        "closed_logs": [
            {"path": str(each.path), "reason": each.reason, "seconds": time.monotonic() - each.since}
            for each in server.stores.latecomers
        ],
        "io_pending": core.storage.pending,
        "orphaned_bytes": core.orphaned_bytes,
        "objects": core.objects,
        "objects_in_logs_only": core.catalogue.cold,
        "evicted": core.catalogue.evicted,
        "counters": dict(core.counters),
        "messages": server.clients.handled,
        "unfinished": server.core.unfinished_work,
        "clients": _clients(server.clients.connections.values()),
        "turns": server.sessions.times.turns.plain(),
        "answers": {kind: times.plain() for kind, times in server.sessions.times.answers.items()},
        "namespaces": len(core.catalogue.namespaces),
        "spaces_known": len(core.catalogue.indexes),
        "spaces": spaces,
        "instances": [
            {
                "instance": attachment.instance,
                "world": attachment.world,
                "ready": attachment.ready and not attachment.broken,
                "lost": attachment.broken,
                "lost_seconds": (time.monotonic_ns() - attachment.since) / 1e9 if attachment.broken else 0.0,
                "leases": len(attachment.operations),
                "prepared_bytes": attachment.prepared,
                "credits": sum(len(space.credits) for space in attachment.spaces.values()),
            }
            for attachment in core.attachments.values()
        ],
        "sessions": [
            {
                "session": connection.id,
                "role": connection.role,
                "instance": connection.instance,
                "engine": connection.engine,
                "rank": connection.rank,
                "pid": connection.pid,
                "open": connection.stage is Stage.SESSION,
                "since": connection.since,
            }
            for connection in server.clients.connections.values()
            if connection.role and connection.role != "admin"
        ],
    }
