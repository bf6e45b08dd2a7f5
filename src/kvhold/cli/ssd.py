"""``kvhold verify`` and ``kvhold inspect``: look at a log in a directory, beside a manager or without one."""

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvhold.cli.show import AsJson, show
from kvhold.units import format_duration, format_size, parse_size

if TYPE_CHECKING:
    from kvhold.tiers.ssd.verify import Damage, Scrub, Summary

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0
"""Between two words of how far it is, where standard error is a terminal, and where it is not."""

Directory = Annotated[Path, typer.Argument(help="The directory that was given with --ssd.")]


def verify(
    directory: Directory,
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Part of the records to read.")] = 1.0,
    rate: Annotated[str, typer.Option(help="Bytes a second, at most; 0 is no limit.")] = "0",
    as_json: AsJson = False,
) -> None:
    """Read records back and compare their checksums. Exits with 1 when any is damaged; a damaged one is a miss.

    What it has done so far is said on standard error.
    """
    from kvhold.tiers.ssd.directory import in_use
    from kvhold.tiers.ssd.survey import DirectoryError
    from kvhold.tiers.ssd.verify import Scrub

    try:
        most = parse_size(rate)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from None
    scrub = Scrub(directory, sample, most, live=in_use(directory))
    damages: list[dict[str, Any]] = []
    try:
        with Progress(scrub):
            for damage in scrub:
                if as_json:
                    damages.append(_plain(damage))
                else:
                    typer.echo(f"{damage.file} byte {damage.at}: {damage.reason}, key {damage.key.hex()}")
    except DirectoryError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    skipped = (
        f", {scrub.skipped_segments} segments that are being written passed over" if scrub.skipped_segments else ""
    )
    bad = {name: count for name, count in sorted(scrub.counts.items()) if name in _BAD and count}
    document = {
        "records": scrub.checked,
        "bytes": scrub.checked_bytes,
        "segments": scrub.segments,
        "skipped_segments": scrub.skipped_segments,
        "damaged": damages,
        "met": bad,
    }
    said = f"{scrub.checked} records, {format_size(scrub.checked_bytes)} read, {scrub.damaged} damaged{skipped}"
    show(document, [said + "".join(f", {name} {count}" for name, count in bad.items())], as_json)
    raise typer.Exit(1 if scrub.damaged or bad else 0)


def _plain(damage: "Damage") -> dict[str, Any]:
    return {name: part.hex() if isinstance(part, bytes) else part for name, part in damage._asdict().items()}


class Progress:
    """How far a scrub is, said on standard error: a line that changes on a terminal, else a line now and then.

    Nothing is said of one that is done before the first line would be.
    """

    def __init__(self, scrub: "Scrub") -> None:
        self._scrub = scrub
        self._terminal = sys.stderr.isatty()
        self._begun = self._said = time.monotonic()
        scrub.progress = self._step

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[K")

    def _step(self) -> None:
        now = time.monotonic()
        if now - self._said >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            self._said = now
            line = self._line(now - self._begun)
            sys.stderr.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
            sys.stderr.flush()

    def _line(self, seconds: float) -> str:
        scrub, done = self._scrub, self._scrub.done_segments
        rate = format_size(int(scrub.checked_bytes / seconds)) if seconds else "0B"
        left = f", about {format_duration(seconds / done * (scrub.segments - done))} left" if done else ""
        return (
            f"{done} of {scrub.segments} segments, {scrub.checked} records, {format_size(scrub.checked_bytes)} read, "
            f"{rate} a second, {scrub.damaged} damaged{left}"
        )


_BAD = (
    "bad_header",
    "wrong_version",
    "foreign",
    "bad_footer",
    "truncated",
    "unreadable",
    "bad_tombstones",
    "lost_tombstones",
    "bad_log",
)
"""What recovery counts as damage; a torn end is how a crash leaves a log."""


def inspect(directory: Directory, as_json: AsJson = False) -> None:
    """Say what a log holds, from its index alone."""
    from kvhold.tiers.ssd.survey import DirectoryError
    from kvhold.tiers.ssd.verify import inspect as summary_of

    try:
        summary = summary_of(directory)
    except DirectoryError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    document = {
        "log": summary.log,
        "path": str(summary.path),
        "disk_bytes": summary.disk_bytes,
        "segments": len(summary.segments),
        "segment_bytes": summary.segment_bytes,
        "records": summary.records,
        "payload_bytes": summary.payload_bytes,
        "useful_records": summary.useful_records,
        "useful_bytes": summary.useful_bytes,
        "oldest": summary.oldest / 1e9,
        "newest": summary.newest / 1e9,
        "namespaces": [
            {"namespace": namespace.hex(), "group": group, "objects": records, "bytes": size}
            for (namespace, group), (records, size) in sorted(summary.namespaces.items())
        ],
        "met": _met(summary),
    }
    show(document, _lines(summary), as_json)


def _met(summary: "Summary") -> dict[str, int]:
    known = ("segments", "records", "sealed")
    return {name: count for name, count in sorted(summary.counts.items()) if count and name not in known}


def _lines(summary: "Summary") -> Iterator[str]:
    yield f"log        {summary.log} in {summary.path}, {format_size(summary.disk_bytes)} on disk"
    yield f"segments   {len(summary.segments)} with records, of {format_size(summary.segment_bytes)}"
    yield f"records    {summary.records}, {format_size(summary.payload_bytes)} of payload"
    useful = f"{summary.useful_records}, {format_size(summary.useful_bytes)}"
    yield f"useful     {useful}, {summary.useful_ratio:.0%} of the disk's bytes"
    if summary.records:
        oldest, newest = (datetime.fromtimestamp(at / 1e9, UTC) for at in (summary.oldest, summary.newest))
        yield f"stored     {oldest:%Y-%m-%d %H:%M:%S} to {newest:%Y-%m-%d %H:%M:%S} UTC"
    for (namespace, group), (records, size) in sorted(summary.namespaces.items()):
        yield f"namespace  {namespace.hex()} group {group}: {records} objects, {format_size(size)}"
    for name, count in _met(summary).items():
        yield f"met        {name} {count}"
