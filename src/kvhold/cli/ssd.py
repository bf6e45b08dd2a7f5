"""``kvhold verify`` and ``kvhold inspect``: look at a log in a directory, beside a manager or without one."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvhold.units import format_size, parse_size

Directory = Annotated[Path, typer.Argument(help="The directory that was given with --ssd.")]


def verify(
    directory: Directory,
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Part of the records to read.")] = 1.0,
    rate: Annotated[str, typer.Option(help="Bytes a second, at most; 0 is no limit.")] = "0",
) -> None:
    """Read records back and compare their checksums. Exits with 1 when any is damaged; a damaged one is a miss."""
    from kvhold.tiers.ssd.directory import in_use
    from kvhold.tiers.ssd.survey import DirectoryError
    from kvhold.tiers.ssd.verify import Scrub

    try:
        most = parse_size(rate)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from None
    scrub = Scrub(directory, sample, most, live=in_use(directory))
    try:
        for damage in scrub:
            typer.echo(f"{damage.file} byte {damage.at}: {damage.reason}, key {damage.key.hex()}")
    except DirectoryError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    skipped = (
        f", {scrub.skipped_segments} segments that are being written passed over" if scrub.skipped_segments else ""
    )
    typer.echo(
        f"{scrub.checked} records, {format_size(scrub.checked_bytes)} read, {scrub.damaged} damaged{skipped}"
        + "".join(f", {name} {count}" for name, count in sorted(scrub.counts.items()) if name in _BAD and count)
    )
    raise typer.Exit(1 if scrub.damaged or any(scrub.counts[name] for name in _BAD) else 0)


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


def inspect(directory: Directory) -> None:
    """Say what a log holds, from its index alone."""
    from kvhold.tiers.ssd.survey import DirectoryError
    from kvhold.tiers.ssd.verify import inspect as summary_of

    try:
        summary = summary_of(directory)
    except DirectoryError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    used = len(summary.segments)
    typer.echo(f"log        {summary.log} in {summary.path}, {format_size(summary.disk_bytes)} on disk")
    typer.echo(f"segments   {used} with records, of {format_size(summary.segment_bytes)}")
    typer.echo(f"records    {summary.records}, {format_size(summary.payload_bytes)} of payload")
    typer.echo(
        f"useful     {summary.useful_records}, {format_size(summary.useful_bytes)}, "
        f"{summary.useful_ratio:.0%} of the disk's bytes"
    )
    if summary.records:
        oldest, newest = (datetime.fromtimestamp(at / 1e9, UTC) for at in (summary.oldest, summary.newest))
        typer.echo(f"stored     {oldest:%Y-%m-%d %H:%M:%S} to {newest:%Y-%m-%d %H:%M:%S} UTC")
    for (namespace, group), (records, size) in sorted(summary.namespaces.items()):
        typer.echo(f"namespace  {namespace.hex()} group {group}: {records} objects, {format_size(size)}")
    for name, count in sorted(summary.counts.items()):
        if count and name not in ("segments", "records", "sealed"):
            typer.echo(f"met        {name} {count}")
