"""What SGLang needs to be imported on a CPU, before anybody does; and a manager for tests without an engine."""

import sys
from collections.abc import Iterator

import pytest
from testbed.process.manager_process import Manager
from testbed.process.peers import populated
from testbed.sglang.engine import SHIMS
from testbed.sglang.shims.on_cpu import PATCHES, Patcher, define_torchvision_operators

sys.path.insert(0, str(SHIMS))
define_torchvision_operators()
sys.meta_path.insert(0, Patcher(PATCHES))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    manager = Manager(tmp_path_factory.mktemp("m"), dram="32MiB")
    populated(manager.socket)
    yield manager
    manager.kill()
