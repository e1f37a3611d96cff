"""Counts of compilations during a measurement, and random models made on the GPU.

    before = count_compilations()
    ...                                     a timed step
    count_compilations() - before           Compilations(graphs=0, kernels=0) if its time has no compilation inside

`graphs` were made by torch.compile; `kernels` are versions of this package's own Triton kernels that were
compiled, or read from the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import counters

import treepack.model.load as load_module

_kernels: list[str] = []  # names, filled by the hook


class Compilations(NamedTuple):
    """Graphs of torch.compile, and versions of Triton kernels."""

    graphs: int
    kernels: int

    def __sub__(self, other: Compilations) -> Compilations:
        """Return the difference of both counts."""
        return Compilations(self.graphs - other.graphs, self.kernels - other.kernels)


def count_compilations() -> Compilations:
    """Return the counts of this process; kernels count from the first call on."""
    if find_spec("triton") is not None:
        from triton import knobs

        runtime: Any = knobs.runtime
        if runtime.jit_post_compile_hook is None:
            runtime.jit_post_compile_hook = lambda **options: _kernels.append(options["repr"])
    return Compilations(int(counters["stats"]["unique_graphs"]), len(_kernels))


@contextmanager
def made_on(device: torch.device) -> Iterator[None]:
    """Draw random weights on the device: on the CPU this takes a minute for the tables of a large vocabulary."""
    module: Any = load_module
    original = module.model_from_config

    def make(*arguments: Any, **choices: Any) -> Any:
        with device:
            return original(*arguments, **choices)

    module.model_from_config = make
    try:
        yield
    finally:
        module.model_from_config = original
