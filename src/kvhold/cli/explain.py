"""``kvhold explain``: the story of one key or one operation."""

from typing import Annotated

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask


def explain(
    what: Annotated[str, typer.Argument(help="A block's hash in hex, or the number of an operation.")],
    socket: Socket = None,
) -> None:
    """Say what happened to a key or an operation lately, why it missed, and who holds it now."""
    if what.isdecimal() and len(what) < 16:
        question = wire.Explain(op=int(what))
    else:
        try:
            question = wire.Explain(key=bytes.fromhex(what))
        except ValueError:
            raise typer.BadParameter(f"{what!r} is neither a number nor hexadecimal") from None
    answer = ask(socket, question)
    assert isinstance(answer, wire.Explained)
    for line in answer.lines:
        typer.echo(line)
