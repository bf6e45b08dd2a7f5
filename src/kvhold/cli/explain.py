"""``kvhold explain``: the history of one key or one operation, or the latest misses."""

import re
from typing import Annotated

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask, fail, find
from kvhold.cli.show import AsJson, show

_OPERATION = re.compile(r"(?:(\d{1,15})/)?(\d{1,15})")
_INTEGER = re.compile(r"\d{17,20}")
"""Longer than an operation's number, and of no hash's length: what KV events call a block."""
_HASH = re.compile(r"(?:[0-9a-f]{2}){8,64}", re.IGNORECASE)


def explain(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A block's hash: all its hexadecimal digits, the last 16, or the integer of vLLM's KV events. Or an "
            "operation: SESSION/OP, or OP for those of all sessions. Without it, the latest misses are listed with "
            "theirs; `kvhold verify` names keys, too, and the manager's log names operations."
        ),
    ] = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Say what happened to a key or an operation lately, why it missed, and who holds it now."""
    question = wire.Explain() if what is None else _question(what)
    socket = find(socket)
    answer = ask(socket, question)
    assert isinstance(answer, wire.Explained)
    lines = answer.lines or (("nothing missed lately",) if what is None else ())
    show({"lines": answer.lines}, lines, as_json)
    if not lines:
        fail(f"nothing is known of {what} by the manager on {socket}: {_WHY_NOT}")


_WHY_NOT = (
    "it was never asked for or stored here, or was so long ago that the manager has forgotten it. Name a hash by all "
    "its digits or by the last 16; `kvhold explain` lists the latest misses"
)


def _question(what: str) -> wire.Explain:
    if (operation := _OPERATION.fullmatch(what)) and int(operation[2]) and int(operation[1] or 1):
        return wire.Explain(op=int(operation[2]), of=int(operation[1] or 0))
    digits = what.removeprefix("...")  # as the latest misses show it
    if _INTEGER.fullmatch(what):
        if int(what) < 1 << 64:
            return wire.Explain(key=int(what).to_bytes(8, "big"))
    elif _HASH.fullmatch(digits):
        return wire.Explain(key=bytes.fromhex(digits))
    raise typer.BadParameter(
        f"{what!r} is neither a block's hash nor an operation; give all hexadecimal digits of a hash or its last 16, "
        "the integer of a KV event, or SESSION/OP, e.g. 3/1"
    )
