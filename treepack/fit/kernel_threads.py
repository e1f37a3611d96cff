"""Compile the Triton kernels of a pass in threads, all at once.

    compile_in_threads(device, run)       kernels that are not compiled yet do not run, and a thread compiles each

A pass that runs its kernels meets them one after the other and waits for each of them: the recurrent layers of a hybrid
have about twenty. Here the pass reads memory that no kernel has written, so its results are of no use; kernels of this
package write no indices, which other operations would follow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch


class KernelThreads:
    """A hook of Triton, which lets threads compile the kernels that a launch would compile."""

    def __init__(self, gpu: int | None) -> None:
        self._worker, self._waiting = threading.local(), dict[tuple[Any, str], Future[Any]]()
        self._pool = ThreadPoolExecutor(initializer=self._begin, initargs=(gpu,))

    def _begin(self, gpu: int | None) -> None:
        self._worker.compiles = True
        if gpu is not None:
            torch.cuda.set_device(gpu)  # a new thread is on the first GPU

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002 - Triton's names
        """Start the compilation of a kernel for these arguments; return True if the launch must be left out."""
        if getattr(self._worker, "compiles", False):
            return False
        kernel, arguments = fn.jit_function, compile["specialization_data"]
        if (kernel, arguments) not in self._waiting:  # layers launch the same kernels
            # `run` is the launcher: some versions of Triton compile it in C.
            self._waiting[kernel, arguments] = self._pool.submit(lambda: kernel.preload(arguments).run)
        return True

    def wait(self) -> None:
        """Wait for all threads; a kernel that does not compile fails again when it is launched."""
        self._pool.shutdown()


def compile_in_threads(device: torch.device, run: Callable[[], object]) -> None:
    """Compile the kernels that `run` launches, without running them; without a GPU or Triton, do nothing."""
    if device.type != "cuda" or find_spec("triton") is None:
        return
    from triton import knobs

    runtime: Any = knobs.runtime
    before, threads = runtime.jit_cache_hook, KernelThreads(torch.cuda.current_device())
    runtime.jit_cache_hook = threads
    try:
        run()
    finally:
        threads.wait()
        runtime.jit_cache_hook = before
