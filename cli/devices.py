"""The check of devices before torch is imported: device files show that no GPU is there, and torch finds the rest."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def check_device(device: str, attention: str = "auto") -> None:
    """Refuse a device, or an attention of GPUs, that cannot be on this machine; torch finds out the rest.

    Raises:
        TreepackError: no device has this name, or no GPU is there for it or for the attention.
    """
    from treepack.errors import TreepackError
    from treepack.train.input_checks import check_device_name

    num_gpus = None if may_have_gpu() else 0
    check_device_name(device, num_gpus)
    on_cpu = device == "cpu" or (device == "auto" and num_gpus == 0)
    if on_cpu and attention == "triton" and find_spec("triton") and "TRITON_INTERPRET" not in os.environ:
        raise TreepackError(
            "attention: triton needs a GPU and the tensors are on cpu; use reference, or let auto choose"
        )


def may_have_gpu() -> bool:
    """Return False on a Linux machine without a device file of a GPU, where torch finds none."""
    # NVIDIA's cards, its boards whose GPU shares the memory, Linux inside Windows, AMD's cards
    names = ("nvidia*", "nvhost*", "dxg", "kfd")
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in names)
