"""``kvhold status`` and ``kvhold purge``: ask a running manager."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhold import protocol as wire
from kvhold.client.channel import AttachError, Channel
from kvhold.client.paths import default_socket, runtime_dir
from kvhold.units import format_size

_SECONDS = 5.0

Socket = Annotated[Path | None, typer.Option(help="Socket of the manager; by default the one that is found.")]


def ask(socket: Path | None, message: wire.ClientMessage) -> wire.ManagerMessage:
    """The answer of the manager on ``socket``, or of the only one found. Exits with a message when there is none."""
    paths = [socket] if socket else [default_socket(), *sorted(runtime_dir().glob("e-*.sock"))]
    failure = "no manager is running; start one with `kvhold serve --dram 4GiB`"
    for path in paths:
        try:
            channel = Channel(path, wire.Hello("admin"), _SECONDS)
        except AttachError as error:
            failure = str(error) if socket or path.is_socket() else failure
            continue
        channel.send(message)
        answers: list[wire.ManagerMessage] = []
        end = time.monotonic() + _SECONDS
        while not answers and not channel.lost and (left := end - time.monotonic()) > 0:
            answers = channel.receive(left)
        match answers:
            case [wire.StatusReply() | wire.Purged() as answer]:
                return answer
            case [wire.Refused(reason)]:
                failure = f"the manager on {path} refused: {reason}"
            case _:
                failure = f"the manager on {path} did not answer"
    typer.echo(failure, err=True)
    raise typer.Exit(1)


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


def purge(
    socket: Socket = None,
    namespace: Annotated[
        str, typer.Option(help="Only this namespace, in hex as `kvhold status --json` shows it.")
    ] = "",
) -> None:
    """Forget what a manager has stored; what is being restored is kept until that ends."""
    try:
        name = bytes.fromhex(namespace)
    except ValueError:
        raise typer.BadParameter(f"{namespace!r} is not hexadecimal") from None
    ask(socket, wire.Purge(name))
    typer.echo("purged")
