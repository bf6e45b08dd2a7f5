"""``kvhold serve``: a manager for every engine on the host."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvhold.client.paths import default_socket
from kvhold.units import parse_size

if TYPE_CHECKING:
    from kvhold.manager.config import SsdConfig


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


def _ssd(text: str, min_free: int) -> "SsdConfig":
    from kvhold.manager.config import parse_ssd

    try:
        return parse_ssd(text, min_free)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def serve(
    dram: Annotated[str, typer.Option(help="Size of the DRAM arena, e.g. 64GiB.")],
    socket: Annotated[Path | None, typer.Option(help="Path of the socket; engines look for the default one.")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT of /metrics and /healthz.")] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(help="PATH:SIZE of a directory that keeps what DRAM cannot, also across restarts."),
    ] = None,
    ssd_min_free: Annotated[str, typer.Option(help="Leave so much of its filesystem free.")] = "1GiB",
    ssd_write_rate: Annotated[str, typer.Option(help="Bytes a second written to each, at most; 0 is no limit.")] = "0",
    ssd_second_touch: Annotated[
        bool, typer.Option("--ssd-second-touch", help="Write only what was stored or found a second time.")
    ] = False,
    huge_pages: Annotated[bool, typer.Option("--huge-pages", help="Back the arena with huge pages.")] = False,
) -> None:
    """Run a manager in the foreground until SIGTERM or SIGINT."""
    from kvhold.core.limits import Limits
    from kvhold.manager.config import ManagerConfig
    from kvhold.manager.process import run

    config = ManagerConfig(
        socket=(socket or default_socket()).absolute(),
        dram=_size(dram),
        huge_pages=huge_pages,
        http=_address(http) if http else None,
        ssd=tuple(_ssd(directory, _size(ssd_min_free)) for directory in ssd or ()),
        limits=Limits(write_rate=_size(ssd_write_rate), second_touch=ssd_second_touch),
    )
    raise typer.Exit(run(config))
