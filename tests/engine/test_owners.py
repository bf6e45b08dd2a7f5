"""Objects are used on the threads that docs/design.md names: every engine that tests serve from is looked at."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.engine.owners import owned, watched

from kvhold.client.control import Control
from kvhold.engines.common.mappings import Mappings

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def test_the_documentation_names_the_thread_of_each_object() -> None:
    [section] = re.findall(r"## Threads\n(.*?)\n## ", DESIGN.read_text(), re.DOTALL)
    named = {name for row in re.findall(r"^\| .*\|$", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {kind.__name__ for kind in owned()} <= named


def test_a_call_by_another_thread_is_noticed() -> None:
    attacher: Any = SimpleNamespace(channel=None)
    control, mappings = Control(attacher, 0.0), object.__new__(Mappings)
    mappings._hello = SimpleNamespace()  # type: ignore[assignment]

    def misuse() -> None:
        with watched():
            control.take_up()
            other = threading.Thread(target=control.take_up)
            other.start()
            other.join()
            mappings.hello()

    with watched():
        control.take_up()
    with pytest.raises(AssertionError) as raised:
        misuse()
    assert "Control.take_up belongs to the engine's thread" in str(raised.value)
    assert "Mappings.hello belongs to the attacher's thread" in str(raised.value)
