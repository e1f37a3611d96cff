"""Launch the output kernels of recurrent layers on a GPU that does not exist, so that threads compile them.

Prints how many were compiled, and how many are compiled again when they are launched later. Nothing is compiled under
TRITON_INTERPRET, so a test starts this file as a process.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from support.output_launches import launches
from treepack.fit.kernel_threads import KernelThreads


class Hopper:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True


def main() -> None:
    """Print both numbers."""
    compiled = list[str]()
    hooks: Any = knobs.runtime
    hooks.jit_post_compile_hook = lambda **options: compiled.append(options["repr"])
    driver.set_active(Hopper())
    made = list(launches(torch.bfloat16, 64, 64).values())[:3]
    hooks.jit_cache_hook = threads = KernelThreads(None)
    for launch in made:
        launch.run()
    threads.wait()
    hooks.jit_cache_hook = None
    first = len(compiled)
    for launch in made:
        launch.kernel.warmup(**launch.arguments, **launch.constants, **launch.options, grid=(1,))
    print(first, "compiled", len(compiled) - first, "again")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        main()
