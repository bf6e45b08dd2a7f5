"""``kvhold limit``: show or change what a running manager keeps to."""

import json
from typing import Annotated

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask
from kvhold.units import parse_size

_ALL = 1 << 62


def limit(
    changes: Annotated[list[str] | None, typer.Argument(help="NAME=VALUE, e.g. prepared_share=0.5.")] = None,
    namespace: Annotated[str, typer.Option(help="In hex as `kvhold status --json` shows it, for the next two.")] = "",
    floor: Annotated[str, typer.Option(help="DRAM that others cannot take from the namespace.")] = "0",
    most: Annotated[str, typer.Option("--max", help="DRAM that the namespace may take.")] = "",
    socket: Socket = None,
) -> None:
    """Print the limits of a running manager, after changing those that are named. A restart forgets them."""
    values: dict[str, float] = {}
    for change in changes or []:
        name, equals, text = change.partition("=")
        try:
            values[name] = float(text) if name.endswith("_share") else float(parse_size(text))
        except ValueError:
            equals = ""
        if not equals:
            raise typer.BadParameter(f"{change!r} is not NAME=VALUE, e.g. prepared_share=0.5 or write_rate=500MiB")
    quotas: dict[bytes, tuple[int, int]] = {}
    if namespace:
        try:
            quotas[bytes.fromhex(namespace)] = parse_size(floor), parse_size(most) if most else _ALL
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    answer = ask(socket, wire.Configure(values, quotas))
    assert isinstance(answer, wire.Configured)
    typer.echo(json.dumps(json.loads(answer.document), indent=2))
