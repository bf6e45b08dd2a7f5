"""What of the processor decides how torch's kernels for CPUs compute, and pack what they keep."""

import os

import torch


def cpu_kernels() -> str:
    """Equal on two hosts whose CPU kernels do the same."""
    return f"{os.uname().machine} {torch.backends.cpu.get_cpu_capability()} amx={torch.cpu._is_amx_tile_supported()}"
