"""How commands print: lines for people, or one JSON document for programs."""

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")]


def show(document: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print ``document``, which is plain data, or ``lines``, which say the same."""
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for line in lines:
        typer.echo(line)
