"""The manager's metrics are those that docs/operations.md explains, and are there before anything has happened."""

import platform
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvhold import __version__
from kvhold.core import Core
from kvhold.core import events as ev
from kvhold.core.log import events as lev
from kvhold.manager.config import ManagerConfig
from kvhold.manager.listener import Listener
from kvhold.manager.memory import ArenaMemory
from kvhold.manager.metrics import metrics
from kvhold.manager.report import report, tell_spaces
from kvhold.manager.server import Server
from kvhold.manager.times import BOUNDS, Histogram
from kvhold.protocol import VERSION
from kvhold.tiers.ssd.counters import ERRORS, REJECTED

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
ROW = re.compile(r"^\| `((?:kvhold|process)_\w+)(?:\{([\w, ]+)\})?` \| (.*) \|$", re.MULTILINE)
NASTY = 'a "b"\\\n{c="d"}'


@pytest.fixture
def said(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The report of a manager that has done nothing, with an engine and an SSD."""
    config = ManagerConfig(tmp_path / "s", 4 << 20)
    with closing(Listener(config.socket)) as listener:
        server = Server(config, listener, ArenaMemory(config.dram, huge_pages=False))
        core = server.core
        for number, role in ((1, ev.Role.SCHEDULER), (2, ev.Role.WORKER)):
            core.handle(ev.Joined(number, role, "engine", 0, 1), number)
        core.handle(ev.Mapped(2), 3)
        core.handle(ev.Open(1, 1, b"n" * 32, 0, 8, (4096,), 1, label=NASTY), 4)
        core.handle(lev.LogOpened(1, 4, 1 << 20), 5)
        spaces: list[dict[str, Any]] = []
        assert len(list(tell_spaces(core.catalogue, b"", spaces))) == 2
        yield report(server, spaces)


class Scrape:
    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said

    def collect(self) -> Iterator[Any]:
        return metrics(self.said)


def test_documented_metrics_are_the_real_ones(said: dict[str, Any]) -> None:
    part = OPERATIONS.read_text().split("<!-- manager metrics: checked against kvhold.manager.metrics -->")[1]
    found = ROW.findall(part.partition("\n\n")[0])
    documented = {name: (set(filter(None, labels.split(", "))), text.replace("`", "")) for name, labels, text in found}
    assert len(documented) == len(found)
    real: dict[str, tuple[set[str], str]] = {}
    for family in metrics(said):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {"version", "python", "protocol"} if family.type == "info" else set(family._labelnames)
        real[name] = labels, family.documentation
    assert documented == real


def test_every_series_is_there_before_its_first_error(said: dict[str, Any]) -> None:
    families = {each.name: each for each in text_string_to_metric_families(generate_latest(Scrape(said)).decode())}
    assert all(
        family.samples
        for family in families.values()
        if family.name != "kvhold_space_idle_seconds" and family.name != "kvhold_space_oldest_seconds"
    )
    for name, kinds in (("errors", ERRORS), ("rejected", REJECTED)):
        samples = families[f"kvhold_ssd_{name}"].samples
        assert {(sample.labels["kind"], sample.value) for sample in samples} == {(kind, 0) for kind in kinds}
    samples = families["kvhold_ssd_out_of_use_seconds"].samples
    assert {(sample.labels["direction"], sample.value) for sample in samples} == {("read", 0), ("write", 0)}
    (build,) = families["kvhold_build_info"].samples
    assert build.labels == {
        "version": __version__,
        "python": platform.python_version(),
        "protocol": str(VERSION),
    }
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20


def test_a_name_is_escaped(said: dict[str, Any]) -> None:
    families = {each.name: each for each in text_string_to_metric_families(generate_latest(Scrape(said)).decode())}
    samples = families["kvhold_space_objects"].samples
    assert {sample.labels["model"] for sample in samples} == {NASTY}
    assert {sample.labels["namespace"] for sample in samples} == {(b"n" * 32).hex()}
    assert families["kvhold_spaces"].samples[0].value == 1


def test_a_histogram_counts_all_that_took_at_most_so_long() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 3.0, 100.0):
        histogram.observe(seconds)
    plain = histogram.plain()
    assert (plain["count"], plain["sum"]) == (5, pytest.approx(103.0, abs=0.001))
    assert [count for _, count in plain["buckets"]] == [2] + [3] * (len(BOUNDS) - 1)


def test_a_report_tells_of_spaces_in_slices() -> None:
    """Of those that were used last, in the order in which they became known; no slice looks at or tells of many."""
    catalogue = Core(4096, 1 << 20).catalogue
    for number in range(3000):
        index = catalogue.index(number.to_bytes(32, "little"), 0, 8, (4096,), 4096)
        assert index is not None
        index.used_at = number if number % 2 else None
    told = list[dict[str, Any]]()
    sizes = [len(told) for _ in tell_spaces(catalogue, b"", told)]
    assert sizes == [0, 0, 0, 64, 128, 192, 256]
    names = [int.from_bytes(bytes.fromhex(one["namespace"]), "little") for one in told]
    assert names == list(range(3000 - 2 * 256 + 1, 3000, 2))
