"""A manager's report as Prometheus metrics. ``docs/operations.md`` lists the same; a test compares the two."""

import platform
from collections.abc import Iterator
from typing import Any

from prometheus_client import PROCESS_COLLECTOR
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvhold.protocol import VERSION
from kvhold.tiers.ssd.counters import ERRORS, REJECTED

COUNTERS = {
    "queries": "Questions asked.",
    "keys_asked": "Keys named in questions that were answered.",
    "keys_resident": "Of those, keys that can be restored.",
    "keys_read": "Of those, keys that had to be read from a log first.",
    "keys_not_stored": "Of the keys asked, those at and after the first one that is not here.",
    "keys_budget": "Of the keys asked, those cut off because too much is leased or being read.",
    "keys_too_large": "Of the keys asked, those of questions for more than can be had at once.",
    "keys_deadline": "Of the keys asked, those that a log did not give in time.",
    "keys_read_failed": "Of the keys asked, those at and after one that a log could not give.",
    "keys_out_of_service": "Of the keys asked, those in a log that is not asked at present.",
    "keys_remote_late": "Of the keys asked, those that the remote store did not give, or say that it has, in time.",
    "keys_remote_down": "Of the keys asked, those that are not here while the remote store is out of service.",
    "commits": "Objects stored.",
    "duplicates": "Objects that were here already when they were committed.",
    "returns": "Granted slots that came back unused.",
    "stale": "What came too late, twice, or was not the sender's: commits, returns, releases, questions.",
    "refused": "Sessions refused.",
    "purged": "Objects purged.",
    "quarantined": "Objects dropped because a restore of them failed.",
    "expired": "Answers that were not used within a minute and hold nothing any more.",
    "stalled": "Restores that took longer than a minute.",
    "over_max_objects": "Objects not kept because max_objects are known and all are held.",
    "unreachable": "Objects not kept because what comes before them in their chain is gone.",
    "forgotten": "Objects given up because nobody can find them any more (their namespace was one engine's "
    "alone, which has left it), or because too many namespaces are known, and theirs was used longest ago.",
    "recovered": "Objects found in logs at the start.",
    "recovered_foreign": "Of what logs held, objects whose geometry is not their namespace's.",
    "recovered_over": "Of what logs held, objects beyond max_objects or of too many namespaces.",
    "read_objects": "Objects read from logs.",
    "read_failed": "Objects that a log could not give, or gave with other bytes; they are misses.",
    "write_objects": "Objects written to logs.",
    "write_failed": "Writes that failed, in whole or in part.",
    "write_first_touch": "Objects not written because it was the first time that they were stored.",
    "write_gone": "Objects that were evicted before they were written.",
    "write_dropped_queue": "Objects not written because too many waited.",
    "write_dropped_errors": "Objects not written because that failed twice.",
    "write_too_large": "Objects larger than a segment.",
    "reuse_failed": "Segments that could not be begun anew.",
    "seal_failed": "Segments whose footer could not be written.",
    "sync_failed": "Flushes that may not outlast a loss of power.",
    "forget_failed": "Purges and quarantines that may not outlast the manager.",
    "reclaimed": "Objects whose segment was given up.",
    "rewritten": "Of those, objects in DRAM that are written again.",
    "stale_io": "Answers to I/Os that were answered already.",
    "clock_went_back": "Times that the clock went back.",
    "audits": "Times that kvhold serve --audit has looked at all rules of the manager's books.",
    "audit_violations": "Rules that did not hold then, each time that one did not: an error of kvhold.",
    "forbidden_moves": "Changes of a slot's state that are against the rules and were not made: an error of kvhold.",
}
SPACE_GAUGES = {
    "objects": "Objects that are known, in DRAM or in logs.",
    "dram_bytes": "Bytes of DRAM that it takes, granted slots included.",
    "idle_seconds": "Seconds since anything of it was stored or used.",
    "oldest_seconds": "Seconds since that object in DRAM was used which has been used least recently.",
}
SPACE_COUNTERS = {
    "keys_asked": "Keys named in questions that were answered.",
    "keys_found": "Of those, keys that can be restored.",
    "keys_read": "Of those, keys that had to be read from a log first.",
}
LOG_GAUGES = {
    "budget_bytes": "What the directory may hold.",
    "live_bytes": "Records that can be found, headers included.",
    "oldest_seconds": "Seconds since the oldest segment with such records was begun.",
    "queued_writes": "Objects that wait to be written.",
    "io_waiting": "I/Os that wait for a thread.",
    "io_running": "I/Os under way.",
    "io_oldest_seconds": "For how long the oldest of those has been.",
}
LOG_COUNTERS = {
    "read_bytes": "Bytes read.",
    "read_seconds": "Seconds spent reading, over all threads.",
    "written_bytes": "Bytes written, headers and footers included.",
    "write_seconds": "Seconds spent writing.",
    "sync_seconds": "Seconds spent in fdatasync.",
    "checksum_seconds": "Seconds spent on checksums.",
    "sync_failures": "Times that fdatasync failed.",
}
LOG_KINDS = {
    "errors": ("Failed calls, by error.", ERRORS),
    "rejected": ("Records read that were not what they should be, by reason.", REJECTED),
}
"""Counters with a label ``kind``, and the kinds that are there from the start, as 0."""
CLIENTS = {
    "connected": "Connections, those included that are lost and whose process has not ended.",
    "limit": "How many there may be.",
}
KEPT = {
    "backings": "Where objects are kept besides DRAM: each log is a directory on an SSD.",
    "backed_objects": "Objects that are there; one that several kinds have counts for each.",
}
DIRECTIONS = ("read", "write")


def metrics(said: dict[str, Any]) -> Iterator[Metric]:
    """The metrics of one report, and of this process."""
    build = {"version": said["version"], "python": platform.python_version(), "protocol": str(VERSION)}
    yield InfoMetricFamily("kvhold_build", "What runs here.", build)
    yield from PROCESS_COLLECTOR.collect()
    state = GaugeMetricFamily(
        "kvhold_arena_state_bytes",
        "Arena bytes by exclusive state; the sum is kvhold_arena_bytes.",
        labels=["state"],
    )
    for name, value in said["accounts"].items():
        state.add_metric([name], value)
    yield state
    for name, (text, value) in gauges(said).items():
        yield GaugeMetricFamily(f"kvhold_{name}", text, value=value)
    yield CounterMetricFamily("kvhold_evicted", "Objects evicted to make room.", value=said["evicted"])
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(f"kvhold_{name}", text, value=said["counters"].get(name, 0))
    turns = HistogramMetricFamily("kvhold_turn_seconds", "How long the loop's turns took.")
    _add(turns, [], said["turns"])
    yield turns
    answers = HistogramMetricFamily(
        "kvhold_answer_seconds",
        "How long it took from when a question was read until its answer was on its way.",
        labels=["kind"],
    )
    for kind, times in said["answers"].items():
        _add(answers, [kind], times)
    yield answers
    for key, text in CLIENTS.items():
        clients = GaugeMetricFamily(f"kvhold_clients_{key}", text, labels=["kind"])
        for kind, counts in said["clients"].items():
            clients.add_metric([kind], counts[key])
        yield clients
    yield from _of_spaces(said["spaces"])
    for key, text in KEPT.items():
        kept = GaugeMetricFamily(f"kvhold_{key}", text, labels=["kind"])
        for kind, counts in said["kept"].items():
            kept.add_metric([kind], counts[key])
        yield kept
    yield from _of_logs(said)


def gauges(said: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Those without labels."""
    return {
        "uptime_seconds": ("Seconds since the manager started.", said["uptime_seconds"]),
        "arena_bytes": ("Populated bytes of the arena.", said["arena"]["populated"]),
        "orphaned_bytes": ("Bytes of engines that are lost and not proved dead.", said["orphaned_bytes"]),
        "objects": ("Objects that are known, in DRAM or in logs.", said["objects"]),
        "objects_in_logs_only": ("Of those, objects that are not in DRAM.", said["objects_in_logs_only"]),
        "spaces": ("Namespaces that are known, each cache group counted.", said["spaces_known"]),
        "unfinished": ("Pieces of work that were begun for clients and are not finished.", said["unfinished"]),
        "sessions": ("Sessions of engines.", sum(session["open"] for session in said["sessions"])),
    }


def _add(family: HistogramMetricFamily, labels: list[str], times: dict[str, Any]) -> None:
    buckets = [(str(bound), count) for bound, count in times["buckets"]]
    family.add_metric(labels, [*buckets, ("+Inf", times["count"])], times["sum"])


def _of_spaces(spaces: list[dict[str, Any]]) -> Iterator[Metric]:
    """By namespace, cache group, and the name under which the model is served."""
    labels = ["namespace", "group", "model"]
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        **{name: GaugeMetricFamily(f"kvhold_space_{name}", text, labels=labels) for name, text in SPACE_GAUGES.items()},
        **{
            name: CounterMetricFamily(f"kvhold_space_{name}", text, labels=labels)
            for name, text in SPACE_COUNTERS.items()
        },
    }
    for name, family in families.items():
        for one in spaces:
            if one[name] is not None:  # what was never used has no age
                family.add_metric([one["namespace"], str(one["group"]), one["model"]], one[name])
        yield family


def _of_logs(said: dict[str, Any]) -> Iterator[Metric]:
    """By the directory's path."""
    logs = said["logs"]
    opened = GaugeMetricFamily("kvhold_ssd_open", "1; 0 while the directory could not be opened.", labels=["path"])
    for one in logs:
        opened.add_metric([one.get("path", "")], 1)
    for one in said["closed_logs"]:
        opened.add_metric([one["path"]], 0)
    yield opened
    out = GaugeMetricFamily(
        "kvhold_ssd_out_of_use_seconds",
        "For how long it has not been read, or written, because that failed or hangs; 0 when it is.",
        labels=["path", "direction"],
    )
    for one in logs:
        for direction in DIRECTIONS:
            since = one["out_of_use"].get(direction)
            out.add_metric([one.get("path", ""), direction], since["seconds"] if since else 0)
    yield out
    for name, text in LOG_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvhold_ssd_{name}", text, labels=["path"])
        for one in logs:
            gauge.add_metric([one.get("path", "")], one.get(name) or 0)
        yield gauge
    for name, text in LOG_COUNTERS.items():
        counter = CounterMetricFamily(f"kvhold_ssd_{name}", text, labels=["path"])
        for one in logs:
            counter.add_metric([one.get("path", "")], one.get(name, 0))
        yield counter
    for family, (text, kinds) in LOG_KINDS.items():
        counter = CounterMetricFamily(f"kvhold_ssd_{family}", text, labels=["path", "kind"])
        for one in logs:
            for kind, count in (dict.fromkeys(kinds, 0) | one.get(family, {})).items():
                counter.add_metric([one.get("path", ""), kind], count)
        yield counter
