"""Kernels are compiled in threads, once each, while a pass leaves out their launches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.paths import ROOT
from treepack.data.batch import empty_batch
from treepack.fit.kernel_threads import KernelThreads, compile_in_threads
from treepack.fit.measure import star
from treepack.recurrent.chunks import build_chunks


class Kernel:
    """A kernel whose compilation asks the hook, as that of Triton does."""

    def __init__(self) -> None:
        self.compiled = list[tuple[str, str, bool]]()
        self.hook: Any = None

    def preload(self, arguments: str) -> Any:
        left_out = self.hook(fn=SimpleNamespace(jit_function=self), compile={"specialization_data": arguments})
        self.compiled.append((arguments, threading.current_thread().name, left_out))
        if arguments == "wrong":
            raise ValueError("this does not compile")
        return SimpleNamespace(run=None)


def test_a_launch_is_left_out_and_a_thread_compiles_its_kernel_once() -> None:
    kernel = Kernel()
    kernel.hook = hook = KernelThreads(None)
    launches = ["bf16", "wrong", "bf16", "fp32"]
    left_out = [hook(fn=SimpleNamespace(jit_function=kernel), compile={"specialization_data": a}) for a in launches]
    hook.wait()
    assert left_out == [True] * 4
    assert sorted(arguments for arguments, _, _ in kernel.compiled) == ["bf16", "fp32", "wrong"]
    assert all(name != threading.current_thread().name and not left_out for _, name, left_out in kernel.compiled)


def test_without_a_gpu_nothing_runs() -> None:
    compile_in_threads(torch.device("cpu"), lambda: pytest.fail("it ran"))


def test_the_tree_of_the_pass_has_stages_of_one_run_and_of_several() -> None:
    # Kernels have other shapes for one run, and another kernel adds up the gradients of states with several readers.
    chunks = build_chunks(star(empty_batch(8), 192).subtree_end[None])
    assert [len(stage.begins) - 1 for stage in chunks.stages] == [1, 8]
    assert len(chunks.state_runs) == 8


@pytest.mark.slow
def test_kernels_of_triton_are_compiled_in_threads_and_not_again() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    command = [sys.executable, "tests/support/threads_ahead_of_time.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "compiled", "0", "again"]
