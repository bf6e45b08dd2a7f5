"""The commands: one file each."""

import typer

from kvhold import __version__
from kvhold.cli.demo import demo
from kvhold.cli.explain import explain
from kvhold.cli.keys import keys
from kvhold.cli.limit import limit
from kvhold.cli.serve import serve
from kvhold.cli.ssd import inspect, verify
from kvhold.cli.status import flush, purge, status

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps the KV cache of LLM engines outside the engine: shared, restored instead of recomputed.",
)
for _command in (serve, status, explain, keys, limit, flush, purge, verify, inspect, demo):
    app.command()(_command)


@app.command()
def version() -> None:
    """Print kvhold's version."""
    typer.echo(__version__)


def main() -> None:
    app()
