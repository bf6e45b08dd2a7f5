"""``kvhold serve``: a manager for every engine on the host."""

from pathlib import Path
from typing import Annotated

import typer

from kvhold.client.paths import default_socket
from kvhold.units import parse_size


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is not an address; write it like 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(
    dram: Annotated[str, typer.Option(help="Size of the DRAM arena, e.g. 64GiB.")],
    socket: Annotated[Path | None, typer.Option(help="Path of the socket; engines look for the default one.")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT of /metrics and /healthz.")] = None,
    huge_pages: Annotated[bool, typer.Option("--huge-pages", help="Back the arena with huge pages.")] = False,
) -> None:
    """Run a manager in the foreground until SIGTERM or SIGINT."""
    from kvhold.manager.config import ManagerConfig
    from kvhold.manager.process import run

    config = ManagerConfig(
        socket=(socket or default_socket()).absolute(),
        dram=_size(dram),
        huge_pages=huge_pages,
        http=_address(http) if http else None,
    )
    raise typer.Exit(run(config))
