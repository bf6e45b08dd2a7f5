"""``kvhold status``, ``flush`` and ``purge``."""

import json
from typing import Annotated, Any

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask, ask_on, connect, fail, find, groups_of, parse_namespace
from kvhold.units import format_size, parse_duration

_DISK_SECONDS = 60.0
"""What disks have to do may take so long."""


def status(
    socket: Socket = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Say what a manager holds and who is attached."""
    reply = ask(socket, wire.Status())
    assert isinstance(reply, wire.StatusReply)
    report: dict[str, Any] = json.loads(reply.document)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    arena, accounts, counters = report["arena"], report["accounts"], report["counters"]
    kind = "an engine's own manager" if report["embedded"] else "manager"
    typer.echo(f"{kind} {report['version']} on {report['socket']}, up {report['uptime_seconds']:.0f} s")
    typer.echo(f"arena    {format_size(arena['bytes'])}, {format_size(arena['populated'])} populated")
    typer.echo("bytes    " + ", ".join(f"{name} {format_size(size)}" for name, size in accounts.items() if size))
    only = f", {report['objects_in_logs_only']} of them only on SSD" if report["logs"] else ""
    typer.echo(f"objects  {report['objects']}{only}; {report['evicted']} evicted so far")
    asked, found = counters.get("keys_asked", 0), counters.get("keys_resident", 0)
    typer.echo(f"queries  {counters.get('queries', 0)}, {found} of {asked} keys were here")
    for log in report["logs"]:
        typer.echo(f"ssd      {_ssd(log)}")
    for closed in report["closed_logs"]:
        typer.echo(f"ssd      {closed['path']} is not open: {closed['reason']}")
    for space in report["spaces"]:
        typer.echo(
            f"space    namespace {space['namespace']} group {space['group']}: {space['objects']} objects of "
            f"{format_size(space['object_bytes'])}"
        )
    for session in report["sessions"]:
        state = "" if session["open"] else ", lost: its bytes wait for the end of the process"
        who = f"{session['role']} rank {session['rank']}, pid {session['pid']}, {session['engine']}"
        typer.echo(f"session  {session['session']}: {who}{state}")


def _ssd(log: dict[str, Any]) -> str:
    """One directory: what it keeps, what waits to be written, and what is wrong with it."""
    recovery, errors = log["recovery"], log["errors"] | log["rejected"]
    parts = [
        f"{log['path']}: {format_size(log['live_bytes'])} of {format_size(log['budget_bytes'])}",
        f"{recovery.get('records', 0)} records found at the start",
        f"{log['queued_writes']} writes queued",
    ]
    if errors:
        parts.append("errors: " + " ".join(f"{kind} {count}" for kind, count in sorted(errors.items())))
    if not log["ready"]:
        parts.append("index being rebuilt")
    return ", ".join(parts)


def flush(socket: Socket = None) -> None:
    """Write to SSD what waits to be written, return when it is there, and say how much of all that is."""
    socket = find(socket)
    answer = ask(socket, wire.Flush(), _DISK_SECONDS)
    assert isinstance(answer, wire.Flushed)
    if not answer.directories:
        fail(
            f"the manager on {socket} has no SSD open: nothing outlasts it; `kvhold status` names directories that it "
            "waits for, `kvhold serve --ssd PATH:SIZE` gives it one"
        )
    typer.echo(f"flushed: the manager on {socket}: {answer.on_ssd} of {answer.objects} objects are on SSD")


def purge(
    socket: Socket = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only this namespace, in hex as `kvhold status` shows it.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(help="Only what is older, e.g. 7d: on SSD by when its segment was begun, else by its last use."),
    ] = None,
) -> None:
    """Forget what a manager has stored, also after a restart; what is being restored is kept until that ends.

    The bytes stay on an SSD until their segment is used again.
    """
    name = b"" if namespace is None else parse_namespace(namespace)
    try:
        older = 0.0 if older_than is None else parse_duration(older_than)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--older-than") from None
    channel = connect(socket)
    unknown = bool(name) and groups_of(channel, name) == ([], False)
    ask_on(channel, wire.Purge(name, older), _DISK_SECONDS)
    typer.echo(f"purged: the manager on {channel.path}")
    if unknown:  # its SSD may have what there was no room to know of
        typer.echo(f"it knew no namespace {namespace}; `kvhold status` lists those that it has", err=True)
