"""What SGLang 0.5.23 lacks to run with HiCache on a CPU without CUDA kernels. Tests alone put this into the path."""

import sys

from testbed.sglang.shims.on_cpu import PATCHES, Patcher, define_torchvision_operators

define_torchvision_operators()
sys.meta_path.insert(0, Patcher(PATCHES))
