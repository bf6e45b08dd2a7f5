"""``kvhold explain``: the story of one key or one operation, or the latest misses."""

from typing import Annotated

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A block's hash in hex, or the number of an operation. Without it, the latest misses are listed with "
            "theirs; `kvhold verify` names keys, too, and the manager's log names operations."
        ),
    ] = None,
    socket: Socket = None,
) -> None:
    """Say what happened to a key or an operation lately, why it missed, and who holds it now."""
    if what is None:
        question = wire.Explain()
    elif what.isdecimal() and len(what) < 16 and int(what):
        question = wire.Explain(op=int(what))
    else:
        try:
            question = wire.Explain(key=bytes.fromhex(what))
        except ValueError:
            question = wire.Explain()
        if not question.key:
            raise typer.BadParameter(f"{what!r} is neither a block's hash in hex nor the number of an operation")
    answer = ask(socket, question)
    assert isinstance(answer, wire.Explained)
    for line in answer.lines:
        typer.echo(line)
