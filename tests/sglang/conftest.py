"""What SGLang needs to be imported on a CPU, before anybody does."""

import sys

from testbed.sglang.engine import SHIMS
from testbed.sglang.shims.on_cpu import PATCHES, Patcher, define_torchvision_operators

sys.path.insert(0, str(SHIMS))
define_torchvision_operators()
sys.meta_path.insert(0, Patcher(PATCHES))
