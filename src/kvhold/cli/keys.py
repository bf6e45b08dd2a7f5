"""``kvhold keys``: what can be found."""

from typing import Annotated

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask_on, connect, parse_namespace

_TIERS = {1: "dram", 2: "ssd"}


def keys(
    namespace: Annotated[str, typer.Argument(help="In hex as `kvhold status` shows it.")],
    group: Annotated[int, typer.Argument(min=0, max=(1 << 32) - 1, help="The cache group, as shown there.")],
    socket: Socket = None,
) -> None:
    """Print each key that can be found, in hex, and where it is: in dram, or on ssd alone."""
    name = parse_namespace(namespace, "NAMESPACE")
    channel = connect(socket)
    found: dict[bytes, int] = {}
    cursor = 0
    while True:
        part = ask_on(channel, wire.List(name, group, cursor))
        assert isinstance(part, wire.Listed)
        width = len(part.keys) // max(1, len(part.tiers))
        for number, tier in enumerate(part.tiers):
            found[part.keys[number * width : (number + 1) * width]] = tier
        cursor = part.cursor
        if not cursor:
            break
    channel.close()
    for key, tier in found.items():
        typer.echo(f"{key.hex()} {_TIERS[tier]}")
