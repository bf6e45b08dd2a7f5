"""``kvhold serve``: a manager for every engine on the host."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvhold.folders import NoFolder, new_socket
from kvhold.units import LEAST_WRITE_RATE, format_size, parse_address, parse_size

if TYPE_CHECKING:
    from kvhold.manager.config import SsdConfig


def _size(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _rate(text: str) -> int:
    rate = _size(text, "--ssd-write-rate")
    if 0 < rate < LEAST_WRITE_RATE:
        raise typer.BadParameter(
            f"{text!r} a second would write next to nothing; give at least {format_size(LEAST_WRITE_RATE)}, or 0 for "
            "no limit",
            param_hint="--ssd-write-rate",
        )
    return rate


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--http") from None


def _ssd(text: str, min_free: int) -> "SsdConfig":
    from kvhold.manager.config import parse_ssd

    try:
        return parse_ssd(text, min_free)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ssd") from None


def _default_socket() -> Path:
    try:
        return new_socket().absolute()
    except NoFolder as error:
        raise typer.BadParameter(str(error), param_hint="--socket") from None


def serve(
    dram: Annotated[str, typer.Option(help="Size of the DRAM arena, e.g. 64GiB.")],
    socket: Annotated[Path | None, typer.Option(help="Path of the socket; engines look for the default one.")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT of /metrics and /healthz.")] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(help="PATH:SIZE of a directory that keeps what DRAM cannot, also across restarts."),
    ] = None,
    ssd_min_free: Annotated[
        str | None, typer.Option(help="Leave so much of its filesystem free.", show_default="1GiB")
    ] = None,
    ssd_write_rate: Annotated[
        str | None, typer.Option(help="Bytes a second written to each, at most; 0 is no limit.", show_default="0")
    ] = None,
    ssd_second_touch: Annotated[
        bool, typer.Option("--ssd-second-touch", help="Write only what was stored or found a second time.")
    ] = False,
    huge_pages: Annotated[bool, typer.Option("--huge-pages", help="Back the arena with huge pages.")] = False,
    eviction: Annotated[
        str, typer.Option(help="Evict what was used longest ago (lru) or used only once (2q).")
    ] = "lru",
    audit: Annotated[
        bool, typer.Option("--audit", help="Check its own books while it serves; log and count what is wrong.")
    ] = False,
) -> None:
    """Run a manager in the foreground until SIGTERM or SIGINT."""
    from kvhold.core.eviction import POLICIES
    from kvhold.core.limits import Limits
    from kvhold.manager.config import MIN_FREE, ManagerConfig
    from kvhold.manager.process import run

    for option, given in (
        ("--ssd-min-free", ssd_min_free is not None),
        ("--ssd-write-rate", ssd_write_rate is not None),
        ("--ssd-second-touch", ssd_second_touch),
    ):
        if given and not ssd:
            raise typer.BadParameter("is for SSD directories; name one with --ssd PATH:SIZE", param_hint=option)
    if eviction not in POLICIES:
        raise typer.BadParameter(f"{eviction!r} is unknown; use one of: {', '.join(POLICIES)}", param_hint="--eviction")
    min_free = MIN_FREE if ssd_min_free is None else _size(ssd_min_free, "--ssd-min-free")
    write_rate = 0 if ssd_write_rate is None else _rate(ssd_write_rate)
    config = ManagerConfig(
        socket=_default_socket() if socket is None else socket.absolute(),
        dram=_size(dram, "--dram"),
        huge_pages=huge_pages,
        eviction=eviction,
        http=_address(http) if http else None,
        ssd=tuple(_ssd(directory, min_free) for directory in ssd or ()),
        limits=Limits(write_rate=write_rate, second_touch=ssd_second_touch),
        audit=audit,
    )
    raise typer.Exit(run(config))
