"""Break the core in many ways, one at a time, and see which test notices.

    PYTHONPATH=tests python -m testbed.mutations.run [--jobs N] [--seconds S] [NAME...]

Each fault changes one passage of a function in a copy of ``src/kvhold/core``, which must be there exactly once: a fault
that does not apply any more is an error, not a pass. The tests run against the copy, the fast ones first, and stop at
the first that fails. A fault that no test notices is a finding.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from testbed.mutations.change import NotThere, Sources
from testbed.mutations.faults import FAULTS, Fault

ROOT: Final = Path(__file__).resolve().parents[3]
STAGES: Final = ("tests/unit/core", "tests/exhaustive/test_small_worlds.py", "tests/property/test_core_model.py")
"""From the fastest to the slowest."""


def core(root: Path) -> Path:
    return root / "src" / "kvhold" / "core"


def check(faults: tuple[Fault, ...] = FAULTS, root: Path = ROOT) -> list[str]:
    """Which faults cannot be made, and why."""
    sources, wrong = Sources(core(root)), []
    for fault in faults:
        try:
            compile(sources.changed(fault.function, fault.old, fault.new).function, fault.name, "exec")
        except (NotThere, SyntaxError) as problem:
            wrong.append(f"{fault.name}: {problem}")
    return wrong


def copy(to: Path, root: Path = ROOT) -> None:
    """What the tests of the core need, so that nobody's edits get in between."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(root / "src", to / "src", ignore=ignore)
    shutil.copytree(root / "tests", to / "tests", ignore=ignore)
    shutil.copy(root / "pyproject.toml", to / "pyproject.toml")


def failing(place: Path, stage: str, seconds: float) -> str | None:
    """The first test of a stage that fails, or None."""
    environment = dict(
        os.environ,
        PYTHONPATH=str(place / "src"),
        PYTHONDONTWRITEBYTECODE="1",
        KVHOLD_SEARCH_SECONDS="1",
    )
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", stage]
    try:
        result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{stage}: no end within {seconds:.0f} s"
    if result.returncode == 0:
        return None
    lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if result.returncode != 1 or not lines or lines[0].startswith("ERROR"):
        raise RuntimeError(f"{stage} could not be run:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return lines[0].removeprefix("FAILED ").split(" - ")[0]


def uses_copy(place: Path) -> bool:
    """Whether a test there imports the copy and not what is installed."""
    code = "import kvhold.core; print(kvhold.core.__file__)"
    environment = dict(os.environ, PYTHONPATH=str(place / "src"))
    where = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return where.stdout.strip().startswith(str(place))


def attempt(fault: Fault, pristine: Path, stages: tuple[str, ...], seconds: float) -> tuple[str | None, float]:
    """Which test caught a fault, if any, and after how long."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copy(place, pristine)
        changed = Sources(core(place)).changed(fault.function, fault.old, fault.new)
        changed.file.write_text(changed.text)
        caught = next((test for stage in stages if (test := failing(place, stage, seconds))), None)
    return caught, time.monotonic() - start


def run(
    faults: tuple[Fault, ...],
    stages: tuple[str, ...] = STAGES,
    seconds: float = 900,
    jobs: int = 1,
    told: Callable[[str], None] = print,
) -> list[Fault]:
    """The faults that survive."""
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder)
        copy(pristine)
        if wrong := check(faults, pristine):
            raise SystemExit("\n".join(wrong))
        if not uses_copy(pristine):
            raise SystemExit("the tests would run against what is installed")
        for stage in stages:
            if test := failing(pristine, stage, seconds):
                raise SystemExit(f"without any fault, this fails: {test}")
        told("| fault | breaks | caught by | seconds |\n|---|---|---|---|")
        survivors = []
        with ThreadPoolExecutor(jobs) as pool:
            results = pool.map(lambda fault: attempt(fault, pristine, stages, seconds), faults)
            for fault, (caught, took) in zip(faults, results, strict=True):
                told(f"| {fault.name} | {fault.breaks} | {caught or '**nothing**'} | {took:.1f} |")
                if caught is None:
                    survivors.append(fault)
        told(f"\n{len(faults) - len(survivors)} of {len(faults)} were caught")
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these faults (any part of a name)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=900, help="limit of one stage")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="only the first so many kinds of tests")
    options = parser.parse_args()
    chosen = tuple(m for m in FAULTS if not options.names or any(name in m.name for name in options.names))
    survivors = run(
        chosen,
        STAGES[: options.stages],
        options.seconds,
        options.jobs,
        lambda line: print(line, flush=True),
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
