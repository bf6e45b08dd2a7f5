"""``kvhold limit``: show or change what a running manager keeps to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhold import protocol as wire
from kvhold.cli.ask import Socket, ask, connect, find, groups_of, parse_namespace
from kvhold.cli.show import AsJson, show
from kvhold.units import format_size, parse_size

_ALL = 1 << 62
_COUNTS = ("max_objects", "write_queue")


def limit(
    changes: Annotated[list[str] | None, typer.Argument(help="NAME=VALUE, e.g. prepared_share=0.5.")] = None,
    namespace: Annotated[
        str | None, typer.Option(help="In hex as `kvhold status` shows it; alone, shows what it has.")
    ] = None,
    floor: Annotated[str | None, typer.Option(help="DRAM that others cannot take from the namespace.")] = None,
    most: Annotated[
        str | None, typer.Option("--max", help="DRAM that the namespace may take, or `none` for no limit.")
    ] = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Print the limits of a running manager, after changing those that are named. A restart forgets them."""
    values = dict(_parse_change(change) for change in changes or [])
    if namespace is None and (floor is not None or most is not None):
        given = "--max" if floor is None else "--floor"
        raise typer.BadParameter("is for one namespace; name it with --namespace", param_hint=given)
    name = None if namespace is None else parse_namespace(namespace)
    floor_bytes = None if floor is None else _size(floor, "--floor")
    most_bytes = None if most is None else _ALL if most == "none" else _size(most, "--max")

    socket = find(socket)  # what is read and what is changed then are one manager's
    quotas: dict[bytes, tuple[int, int]] = {}
    if name is not None and (floor_bytes is not None or most_bytes is not None):
        if floor_bytes is None or most_bytes is None:
            present = _quota(_configure(socket, {}, {}), name)
            floor_bytes = present["floor"] if floor_bytes is None else floor_bytes
            if most_bytes is None:
                most_bytes = _ALL if present["limit"] is None else present["limit"]
        quotas[name] = floor_bytes, most_bytes
    document = _configure(socket, values, quotas)
    if name is not None and not values and not quotas:
        document = {"quotas": {name.hex(): _quota(document, name)}}
    show(document, _lines(document), as_json)
    if name is not None and not groups_of(connect(socket), name)[0]:
        typer.echo(
            f"no engine has used namespace {namespace} on this manager yet: these limits apply once one does; "
            "`kvhold status` lists the namespaces that are known",
            err=True,
        )


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """The limits, and then the namespaces that have some of their own."""
    for name, value in document.items():
        if name in _COUNTS or name.endswith("_share"):
            yield f"{name:18} {value}"
        elif name != "quotas":
            yield f"{name:18} {format_size(value) if value else '0 (no limit)'}"
    for name, quota in document["quotas"].items():
        most = "none" if quota["limit"] is None else format_size(quota["limit"])
        yield f"namespace {name}: floor {format_size(quota['floor'])}, max {most}"


def _configure(socket: Path, values: dict[str, float], quotas: dict[bytes, tuple[int, int]]) -> dict[str, Any]:
    """The limits of the manager, after these changes."""
    answer = ask(socket, wire.Configure(values, quotas))
    assert isinstance(answer, wire.Configured)
    document: dict[str, Any] = json.loads(answer.document)
    return document


def _quota(document: dict[str, Any], namespace: bytes) -> dict[str, Any]:
    quota: dict[str, Any] = document["quotas"].get(namespace.hex(), {"floor": 0, "limit": None})
    return quota


def _parse_change(change: str) -> tuple[str, float]:
    from kvhold.manager.limits import CHANGEABLE

    name, equals, text = change.partition("=")
    if not equals:
        raise typer.BadParameter(f"{change!r} is not NAME=VALUE, e.g. prepared_share=0.5 or write_rate=500MiB")
    if name not in CHANGEABLE:
        raise typer.BadParameter(f"{change}: there is no limit {name!r}; there are: {', '.join(CHANGEABLE)}")
    try:
        if name.endswith("_share"):
            return name, float(text)
    except ValueError:
        raise typer.BadParameter(f"{change}: {text!r} is not a share; give a number from 0 to 1, e.g. 0.5") from None
    if name not in _COUNTS:
        return name, float(_size(text, None, f"{change}: "))
    if not text.isdecimal():
        raise typer.BadParameter(f"{change}: {text!r} is not a count; give a whole number, e.g. 1000000")
    return name, float(text)


def _size(text: str, option: str | None, where: str = "") -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{where}{error}", param_hint=option) from None
