"""``kvhold remote check``: whether a store that hosts share is of use, before a manager is given it."""

from typing import Annotated

import typer

from kvhold.cli.show import AsJson, show
from kvhold.units import format_size

remote = typer.Typer(no_args_is_help=True, help="A store that hosts share.")


@remote.callback()
def _before() -> None:
    """Without it Typer would take a group of one command for that command."""


@remote.command()
def check(
    url: Annotated[str, typer.Argument(help="The store, e.g. redis://HOST:PORT or file:///FOLDER.")],
    as_json: AsJson = False,
) -> None:
    """Probe a store, move 8 MiB to it and back, and say how fast that was or what is missing. Exits with 1 then.

    What is put there for that is removed again.
    """
    from kvhold.tiers.remote.check import check as try_it
    from kvhold.tiers.remote.url import parse_remote

    try:
        config = parse_remote(url)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    checked = try_it(config)
    document = {
        "url": config.shown,
        "state": checked.state,
        "why": checked.why,
        "put_bytes_per_second": checked.put,
        "get_bytes_per_second": checked.got,
        "ask_seconds": checked.asked,
    }
    said = f"{config.shown}: {checked.state}"
    if checked.why:
        lines = [f"{said}: {checked.why}"]
    else:
        rates = f"put {format_size(int(checked.put))}/s, get {format_size(int(checked.got))}/s"
        lines = [f"{said}; {rates}, a question {1000 * checked.asked:.1f} ms"]
    show(document, lines, as_json)
    raise typer.Exit(0 if checked.state == "serving" else 1)
