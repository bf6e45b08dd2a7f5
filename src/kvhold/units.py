"""What people write and read: sizes (``64GiB``, ``1.5GB``), times (``7d``), directories and addresses."""

import ipaddress
import re
from fractions import Fraction
from pathlib import Path

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*$", re.IGNORECASE)


LEAST_SSD = 4 << 20
"""The least that an SSD directory may be given, in bytes."""
LEAST_WRITE_RATE = 1 << 20
"""The least that may be written to it in a second, where that is limited. One write is of up to 16MiB."""


def parse_size(text: str | int) -> int:
    """Bytes named by ``text``: a number with an optional unit (``KiB``, ``MB``, ``GiB``, ...).

    Raises ValueError, naming the value and an example of what is accepted.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"{text!r} is not a size; write it like '64GiB' or '512MiB'")
    match = _SIZE.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it like '64GiB' or '512MiB'")
    return int(Fraction(match[1]) * _FACTORS[(match[2] or "").lower()])


def format_size(size: int) -> str:
    """``size`` bytes in the largest binary unit that keeps it readable."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}TiB"


def exact_size(size: int) -> str:
    """``size`` bytes, all of them, in the largest binary unit that says them with whole numbers."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def parse_directory(text: str) -> tuple[Path, int]:
    """An SSD directory, absolute, and the bytes that it may hold, of ``PATH:SIZE``. Raises ValueError."""
    path, colon, size = text.rpartition(":")
    if not colon or not path:
        raise ValueError(f"{text!r} is not PATH:SIZE, e.g. /var/cache/kvhold:500GiB")
    if not Path(path).is_absolute():
        raise ValueError(f"ssd: {path!r} is not an absolute path; write it like /var/cache/kvhold:500GiB")
    try:
        budget = parse_size(size)
    except ValueError as error:
        raise ValueError(f"ssd: {text!r}: {error}") from None
    if budget < LEAST_SSD:
        raise ValueError(f"ssd: {format_size(budget)} for {path} is too small; give at least {format_size(LEAST_SSD)}")
    return Path(path), budget


_HOST = re.compile(r"[A-Za-z0-9._-]+")
_PORT = re.compile(r"[0-9]{1,5}")


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, where an IPv6 address is in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT; write it like 127.0.0.1:9464 or [::1]:9464")
    if not host:
        raise ValueError(
            f"{text!r} names no host; write 127.0.0.1{text} for this host alone, or 0.0.0.0{text} for all that reach it"
        )
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1])), int(port)
        except ValueError:
            raise ValueError(f"{text!r}: {host[1:-1]!r} is not an IPv6 address; write it like [::1]:9464") from None
    if not _HOST.fullmatch(host):
        raise ValueError(f"{text!r} is not HOST:PORT; write it like 127.0.0.1:9464, an IPv6 address like [::1]:9464")
    return host, int(port)


_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([smhd])\s*$", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_duration(text: str) -> float:
    """Seconds named by ``text``: a number and a unit, ``s``, ``m``, ``h`` or ``d``. Raises ValueError."""
    match = _DURATION.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; write it like '90s', '30m', '12h' or '7d'")
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_duration(seconds: float) -> str:
    """``seconds`` in the two largest units that say them: ``45 s``, ``3 min 20 s``, ``2 d 4 h``."""
    left = max(0, int(seconds))
    if left < 10 and seconds != left:
        return f"{max(0.0, seconds):.1f} s"
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"
