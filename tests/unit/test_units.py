"""Sizes as people write and read them."""

import re

import pytest

from kvhold.units import exact_size, format_size, parse_address, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("512MiB", 512 << 20),
        ("4 kib", 4096),
        ("1.5GB", 1_500_000_000),
        ("4.35GB", 4_350_000_000),
        ("2T", 2 * 10**12),
        ("1TiB", 1 << 40),
        ("0.5Mi", 1 << 19),
        (" 7 ", 7),
        ("7b", 7),
        ("0", 0),
        (4096, 4096),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1GiB", "1e9", "1 GiB 2", "GiB", "1.GiB", ".5GiB", "1XiB", "inf", "1iB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write it like '64GiB' or '512MiB'") as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("value", [True, None, 1.5, b"1GiB", ["1GiB"]])
def test_what_is_no_text_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(1 << 53) + 1, (1 << 60) + 1, 2**63 - 1])
def test_large_numbers_are_exact(size: int) -> None:
    assert parse_size(str(size)) == parse_size(size) == size
    assert parse_size(f"{size}TiB") == size << 40


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (4096, "4KiB"),
        (1536 << 10, "1.5MiB"),
        (64 << 30, "64GiB"),
        (5 << 40, "5TiB"),
        (5000 << 40, "5000TiB"),
        (-4096, "-4KiB"),
    ],
)
def test_sizes_are_written(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize("size", [1, 4096, 3 << 20, 1 << 30, 12 << 40])
def test_what_is_written_can_be_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5m", 90), ("12h", 43_200), (" 7 D ", 604_800), ("0s", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1w", "1d2h", "nan s"])
def test_what_is_not_a_duration_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0B"), (1023, "1023B"), (1261568, "1232KiB"), (3 << 20, "3MiB"), (5 << 40, "5TiB")]
)
def test_exact_sizes_are_read_as_they_are_written(size: int, text: str) -> None:
    assert exact_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("localhost", 0)),
        ("my-host.example:65535", ("my-host.example", 65535)),
        ("[::1]:9464", ("::1", 9464)),
        ("[::]:1", ("::", 1)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[::1:9464", "write it like 127.0.0.1:9464, an IPv6 address like [::1]:9464"),
        ("::1]:9464", "an IPv6 address like [::1]:9464"),
        ("::1:9464", "an IPv6 address like [::1]:9464"),
        ("[127.0.0.1]:9464", "'127.0.0.1' is not an IPv6 address; write it like [::1]:9464"),
        ("[localhost]:9464", "'localhost' is not an IPv6 address"),
        ("[]:9464", "'' is not an IPv6 address"),
        ("[::1]", "is not HOST:PORT"),
        (":9464", "names no host; write 127.0.0.1:9464 for this host alone, or 0.0.0.0:9464 for all that reach it"),
        ("http://127.0.0.1:9464", "is not HOST:PORT"),
        ("a b:9464", "is not HOST:PORT"),
        ("127.0.0.1:65536", "is not HOST:PORT; write it like 127.0.0.1:9464 or [::1]:9464"),
        ("127.0.0.1:", "is not HOST:PORT"),
        ("127.0.0.1:١", "is not HOST:PORT"),
        ("9464", "is not HOST:PORT"),
        ("", "is not HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_address(text)
