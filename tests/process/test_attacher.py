"""Which manager a half of an engine gets, and what the log says about that: what is so, once it is so."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import until

from kvhold.client import attacher
from kvhold.client.attacher import Attacher
from kvhold.client.channel import Channel
from kvhold.client.embedded import Embedded
from kvhold.protocol import Hello

DRAM = 16 << 20


class Scheduler:
    """A half that only attaches."""

    def __init__(self, name: str) -> None:
        self._name = name

    def hello(self) -> Hello:
        return Hello("scheduler", self._name)

    def attached(self, channel: Channel) -> None:
        pass

    def readable(self, channel: Channel) -> None:
        channel.receive()

    def tick(self, channel: Channel) -> bool:
        return False


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What attachers log."""
    lines: list[tuple[str, str]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(attacher.log, level, lambda text, *args, level=level: lines.append((level, text % args)))
    return lines


@contextmanager
def kept(
    folder: Path, name: str = "one", dram: int = DRAM, found: list[Path] | None = None, wait: float = 60
) -> Iterator[Attacher]:
    """An attacher that has made its first attempt or was waited for, with an own manager beside the host's."""
    own = folder / "e-1.sock"
    preferred = None if found is None else found.append
    kept = Attacher(Scheduler(name), [folder / "kvhold.sock"], Embedded([own], dram, False, None), True, preferred)
    kept.start(wait)
    try:
        yield kept
    finally:
        kept.stop(lambda: None)


def test_an_own_manager_is_spoken_of_by_who_started_it(folder: Path, said: list[tuple[str, str]]) -> None:
    own, hosts = folder / "e-1.sock", folder / "kvhold.sock"
    started = ("info", f"kvhold: no manager on {hosts}; the engine has started its own with 16MiB of DRAM")
    attached = ("info", f"kvhold: attached to the manager on {own}")
    found: list[Path] = []
    with kept(folder, "one", found=found, wait=0) as first, kept(folder, "two", found=found) as second:  # ranks
        until(lambda: first.channel and second.channel, "attached")
        assert sorted(said) == [attached, attached, started]
        with kept(folder, "three", found=found) as third:
            until(lambda: third.channel, "attached")
            assert sorted(said) == [attached, attached, attached, started]
    assert found == []


def test_the_hosts_manager_is_told_of_and_no_other(manager: Manager, folder: Path, said: list[tuple[str, str]]) -> None:
    found: list[Path] = []
    with kept(folder, found=found) as half:
        until(lambda: half.channel, "attached")
        assert said == [("info", f"kvhold: attached to the manager on {manager.socket}")]
        assert found == [manager.socket]
        manager.restart()
        until(lambda: said.count(said[0]) == 2, "attached again")
        assert found == [manager.socket], "it was decided once"


@pytest.mark.parametrize("why", ["timed out", "refused"])
def test_an_own_manager_in_place_of_one_that_is_of_no_use(
    manager: Manager, folder: Path, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    namesake = Channel(manager.socket, Hello("scheduler", "one"), 60)
    if why == "timed out":
        manager.stop()
        monkeypatch.setattr(attacher, "_CONNECT_SECONDS", 2.0)
    found: list[Path] = []
    with kept(folder, "one", found=found) as half:
        until(lambda: half.channel, "attached")
        assert half.channel.path != manager.socket
        level, text = said[0]
        assert level == "warning"
        assert f"{manager.socket}" in text
        assert why in text
        assert text.endswith("; the engine has started its own with 16MiB of DRAM instead")
        assert found == []
    namesake.close()


def test_both_are_named_when_neither_can_be_had(
    manager: Manager, folder: Path, said: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacher, "_CONNECT_SECONDS", 0.2)
    manager.stop()
    with kept(folder, dram=1 << 20) as half:
        assert half.channel is None
        level, text = said[0]
        assert level == "warning"
        assert (
            f"no manager answers on {manager.socket}: timed out; the engine's own manager did not start: dram: " in text
        )


def test_an_own_manager_is_found_in_each_folder(manager: Manager, folder: Path) -> None:
    """The first of an engine's processes has started it where its folder has gone since, or before there was one."""
    found: list[Path] = []
    own = Embedded([folder / "gone" / "e-1.sock", manager.socket], DRAM, False, None)
    half = Attacher(Scheduler("one"), [folder / "nobody.sock"], own, True, found.append)
    half.start(60)
    try:
        assert half.channel is not None
        assert half.channel.path == manager.socket
        assert found == [], "it is the engine's own"
    finally:
        half.stop(lambda: None)


class Unwelcome(Scheduler):
    """A half whose sessions are over as soon as they begin."""

    def attached(self, channel: Channel) -> None:
        channel.abandon()


@pytest.mark.parametrize("short", [True, False])
def test_who_is_sent_away_again_and_again_waits_longer_each_time(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    monkeypatch.setattr(attacher, "_SHORT_SECONDS", 60.0 if short else 0.0)
    half, pauses, attached = Attacher(Unwelcome("one"), [manager.socket], None, True), [], []
    monkeypatch.setattr(half, "_pause", pauses.append)
    monkeypatch.setattr(half, "_watch", attached.append)
    half.start(60)
    until(lambda: len(attached) >= 14, "attached again and again")
    half.stop(lambda: None)
    if short:
        assert pauses[:8] == [0.08 * 2**number for number in range(7)] + [10.0]
        assert set(pauses[8:]) == {10.0}
    else:
        assert not pauses
