"""What a manager says about itself: one document for ``kvhold status``, the metrics and the tests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvhold import __version__
from kvhold.manager.connection import Stage
from kvhold.manager.limits import limits_document

if TYPE_CHECKING:
    from kvhold.manager.server import Server


def report(server: Server) -> dict[str, Any]:
    """Plain data; sizes in bytes. ``accounts`` sum to ``arena.populated``."""
    core = server.core
    return {
        "version": __version__,
        "incarnation": server.incarnation,
        "socket": str(server.config.socket),
        "embedded": server.config.starter_fd is not None,
        "uptime_seconds": time.monotonic() - server.started,
        "arena": {"bytes": server.memory.bytes, "populated": core.arena.total, "page": server.memory.page},
        "accounts": core.accounts(),
        "limits": limits_document(core.common.limits),
        "logs": [
            {
                "log": number,
                "segments": len(device.log.segments) + len(device.log.free) + len(device.log.fresh),
                "segment_bytes": device.log.segment_bytes,
                "live_bytes": device.log.live,
                "queued_writes": len(device.queue),
                "ready": device.ready,
                **(server.stores[number].report() if number in server.stores else {}),
            }
            for number, device in core.storage.devices.items()
        ],
        "closed_logs": [{"path": str(each.path), "reason": each.reason} for each in server.latecomers],
        "io_pending": core.storage.pending,
        "limbo_bytes": core.limbo_bytes,
        "objects": core.objects,
        "objects_in_logs_only": core.catalogue.cold,
        "evicted": core.catalogue.evicted,
        "counters": dict(core.counters),
        "spaces": [
            {
                "namespace": index.namespace.name.hex(),
                "group": index.group,
                "objects": len(index),
                "object_bytes": index.size,
                "users": index.users,
            }
            for index in core.catalogue.indexes.values()
        ],
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
            for connection in server.connections.values()
            if connection.role and connection.role != "admin"
        ],
    }
