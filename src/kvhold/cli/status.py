"""``kvhold status``, ``flush`` and ``purge``."""

import json
from typing import Annotated, Any

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask
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
    typer.echo(f"objects  {report['objects']}, {report['evicted']} evicted so far")
    asked, found = counters.get("keys_asked", 0), counters.get("keys_resident", 0)
    typer.echo(f"queries  {counters.get('queries', 0)}, {found} of {asked} keys were here")
    for session in report["sessions"]:
        state = "" if session["open"] else ", lost: its bytes wait for the end of the process"
        typer.echo(
            f"session  {session['role']} rank {session['rank']}, pid {session['pid']}, {session['engine']}{state}"
        )


def flush(socket: Socket = None) -> None:
    """Write to SSD what a manager has stored, and return when it is there."""
    ask(socket, wire.Flush(), _DISK_SECONDS)
    typer.echo("flushed")


def purge(
    socket: Socket = None,
    namespace: Annotated[
        str, typer.Option(help="Only this namespace, in hex as `kvhold status --json` shows it.")
    ] = "",
    older_than: Annotated[
        str,
        typer.Option(help="Only what is older, e.g. 7d: on SSD by when its segment was begun, else by its last use."),
    ] = "",
) -> None:
    """Forget what a manager has stored, also after a restart; what is being restored is kept until that ends."""
    try:
        name = bytes.fromhex(namespace)
    except ValueError:
        raise typer.BadParameter(f"{namespace!r} is not hexadecimal") from None
    try:
        older = parse_duration(older_than) if older_than else 0.0
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    ask(socket, wire.Purge(name, older), _DISK_SECONDS)
    typer.echo("purged")
