"""What docs say of SGLang's settings, metrics and reasons is what there is."""

import re
from pathlib import Path

from kvhold.engines.sglang.refusals import LAYOUTS
from kvhold.engines.sglang.settings import SglangSettings
from kvhold.engines.sglang.stats import BY_REASON, METRICS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "sglang.md").read_text()


def shown(value: object) -> str:
    return "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def test_documented_settings_are_the_real_ones() -> None:
    part = (DOCS / "configuration.md").read_text().split("## SGLang\n")[1].split("## The manager")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", part, re.MULTILINE))
    defaults = SglangSettings()
    assert documented == {name: shown(getattr(defaults, name)) for name in SglangSettings.__struct_fields__}


def test_documented_metrics_are_the_real_ones() -> None:
    found = re.findall(r"^\| `kvhold:(\w+)_total(\{reason\})?` \| (.*) \|$", PAGE, re.MULTILINE)
    assert {name: (bool(reason), text) for name, reason, text in found} == {
        name: (name in BY_REASON, text) for name, text in METRICS.items()
    }


def test_documented_reasons_are_the_real_ones() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE.split("| reason | why |")[1].split("## ")[0], re.MULTILINE)
    documented = [word for row in rows for word in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted({reason for reasons in BY_REASON.values() for reason in reasons})


def test_documented_layouts_are_the_real_ones() -> None:
    [row] = re.findall(r"^\| `--hicache-mem-layout` \| (.*?) work\.", PAGE, re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", row)) == LAYOUTS
