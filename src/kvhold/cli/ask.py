"""Asking a running manager, for the commands that do."""

import json
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvhold import protocol as wire
from kvhold.client.channel import AttachError, Channel
from kvhold.folders import sockets
from kvhold.host import listens

_SECONDS = 5.0

Socket = Annotated[Path | None, typer.Option(help="Socket of the manager; by default that of the only one there is.")]


def find(socket: Path | None) -> Path:
    """The socket to ask on: ``socket``, or that of the only manager of this user. Exits with a message otherwise.

    One that listens but does not answer counts: a command that forgets or changes things must not go to another one.
    """
    if socket is not None:
        return socket
    defaults = sockets()
    living = [path for path in defaults if listens(path)]
    living += [path for default in defaults for path in sorted(default.parent.glob("e-*.sock")) if listens(path)]
    if not living:
        looked = "".join(f"\n  {path}" for path in defaults)
        fail(
            "no manager is running: nobody listens on one of these, nor on the socket of an engine's own manager "
            f"(e-*.sock) beside them:{looked}\nstart one with `kvhold serve --dram 4GiB`, or name one with --socket"
        )
    if len(living) > 1:
        fail("several managers are running; name one of them:" + "".join(f"\n  --socket {path}" for path in living))
    return living[0]


def ask(socket: Path | None, message: wire.ClientMessage, seconds: float = 0.0) -> wire.ManagerMessage:
    """The answer of the manager that :func:`find` finds. Exits with a message when there is none.

    ``seconds`` for what takes a manager longer than a moment.
    """
    return ask_on(connect(socket), message, seconds)


def connect(socket: Path | None) -> Channel:
    """A session with the manager that :func:`find` finds. Exits with a message when there is none."""
    path = find(socket)
    try:
        return Channel(path, wire.Hello("admin"), _SECONDS)
    except AttachError as error:
        known = str(path) in str(error)
        fail(str(error) if known else f"{path} is not the socket of a manager of this kvhold: {error}")


def ask_on(channel: Channel, message: wire.ClientMessage, seconds: float = 0.0) -> wire.ManagerMessage:
    """One more answer of the manager at the other end. Exits with a message when there is none."""
    channel.send(message)
    answers: list[wire.ManagerMessage] = []
    end = time.monotonic() + max(seconds, _SECONDS)
    while not answers and not channel.lost and (left := end - time.monotonic()) > 0:
        answers = channel.receive(left)
    if not answers:
        fail(f"the manager on {channel.path} did not answer")
    if isinstance(answers[0], wire.Refused):
        fail(f"the manager on {channel.path} refused: {answers[0].reason}")
    return answers[0]


def groups_of(channel: Channel, namespace: bytes) -> tuple[list[int], bool]:
    """The cache groups that a manager knows of a namespace; whether an SSD may hold more, not known yet."""
    reply = ask_on(channel, wire.Status(namespace))
    assert isinstance(reply, wire.StatusReply)
    report = json.loads(reply.document)
    groups = [space["group"] for space in report["spaces"] if space["namespace"] == namespace.hex()]
    return sorted(groups), bool(report["closed_logs"]) or not all(log["ready"] for log in report["logs"])


def parse_namespace(text: str, hint: str = "--namespace") -> bytes:
    """The namespace that the parameter ``hint`` names. An empty one is none: it would mean all of them."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b""
    if len(name) != 32:
        raise typer.BadParameter(
            f"{text!r} is no namespace; give all 64 hexadecimal digits, as `kvhold status` shows them",
            param_hint=hint,
        )
    return name


def fail(reason: str) -> NoReturn:
    typer.echo(reason, err=True)
    raise typer.Exit(1)
