"""Fixtures of the process tests: real managers on real sockets, in folders of their own."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.process.manager_process import Manager
from testbed.process.puppet import Puppet


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a path short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="kvhold-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Manager]]:
    """Starts ``kvhold serve`` with further options; keyword arguments are those of Manager."""
    managers: list[Manager] = []

    def start(*options: str, dram: str = "32MiB", **how: object) -> Manager:
        managers.append(Manager(folder, *options, dram=dram, **how))  # type: ignore[arg-type]
        return managers[-1]

    yield start
    for manager in managers:
        manager.kill()


@pytest.fixture
def manager(serve: Callable[..., Manager]) -> Manager:
    """A manager with 32 MiB of DRAM, in pages of 2 MiB."""
    return serve()


@pytest.fixture
def puppet(folder: Path) -> Iterator[Callable[[], Puppet]]:
    """Makes puppets; what they start finds its sockets below ``folder``."""
    puppets: list[Puppet] = []

    def make() -> Puppet:
        puppets.append(Puppet(folder))
        return puppets[-1]

    yield make
    for each in puppets:
        each.kill()


@pytest.fixture
def tmpfs(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a filesystem of some size below ``folder``, where that may be done."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        where = folder / f"fs{len(mounted)}"
        where.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "kvhold-test", str(where)]
        if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("nothing can be mounted here")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", "-l", str(where)], capture_output=True, check=False)
