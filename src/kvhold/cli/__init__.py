"""The commands: one file each."""

import platform
from typing import Annotated

import typer

from kvhold import __version__
from kvhold.cli.demo import demo
from kvhold.cli.explain import explain
from kvhold.cli.keys import keys
from kvhold.cli.limit import limit
from kvhold.cli.remote import remote
from kvhold.cli.serve import serve
from kvhold.cli.show import AsJson, show
from kvhold.cli.ssd import inspect, verify
from kvhold.cli.status import flush, purge, status
from kvhold.protocol import VERSION

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps the KV cache of LLM engines outside the engine: shared, restored instead of recomputed.",
)
for _command in (serve, status, explain, keys, limit, flush, purge, verify, inspect, demo):
    app.command()(_command)
app.add_typer(remote, name="remote")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print kvhold's version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print kvhold's version, and with --json also those of Python and of the protocol."""
    document = {"version": __version__, "python": platform.python_version(), "protocol": VERSION}
    show(document, [__version__], as_json)


def main() -> None:
    app()
