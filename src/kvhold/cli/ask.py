"""Asking a running manager, for the commands that do."""

import time
from pathlib import Path
from typing import Annotated

import typer

from kvhold import protocol as wire
from kvhold.client.channel import AttachError, Channel
from kvhold.client.paths import default_socket, runtime_dir

_SECONDS = 5.0

Socket = Annotated[Path | None, typer.Option(help="Socket of the manager; by default the one that is found.")]


def ask(socket: Path | None, message: wire.ClientMessage, seconds: float = 0.0) -> wire.ManagerMessage:
    """The answer of the manager on ``socket``, or of the only one found. Exits with a message when there is none.

    ``seconds`` for what takes a manager longer than a moment.
    """
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
        end = time.monotonic() + max(seconds, _SECONDS)
        while not answers and not channel.lost and (left := end - time.monotonic()) > 0:
            answers = channel.receive(left)
        match answers:
            case [wire.Refused(reason), *_]:
                failure = f"the manager on {path} refused: {reason}"
            case [answer, *_]:
                return answer
            case _:
                failure = f"the manager on {path} did not answer"
    typer.echo(failure, err=True)
    raise typer.Exit(1)
