"""The kernels of tree attention, compiled for GPUs that this machine lacks: registers, shared memory, instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ahead_of_time import Report, read
from support.paths import ROOT
from treepack.attention.dispatch import WIDE_SHARED

triton = pytest.importorskip("triton")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton comes without ptxas")


def compiled(*cases: str) -> list[Report]:
    """Return reports on all passes of each table/dtype/capability/dims, from a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "tests/support/ahead_of_time.py", *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = read(done.stdout)
    assert len(reports) == 3 * len(cases)
    return reports


def test_every_head_dimension_of_the_hopper_kernels_has_a_shape_in_parts_that_add_up() -> None:
    from treepack.attention.autograd import HOPPER_HEAD_DIMS
    from treepack.attention.hopper.shapes import SHAPES

    assert set(SHAPES) == HOPPER_HEAD_DIMS
    assert {dims for dims, shape in SHAPES.items() if shape.parts is None} == {(64, 64), (128, 128)}
    for dims, shape in SHAPES.items():
        if shape.parts is not None and shape.parts_v is not None:
            assert (sum(shape.parts), sum(shape.parts_v)) == dims
            # gradients and outputs go through tiles of q and k
            assert shape.parts_v == shape.parts[: len(shape.parts_v)]


SPILLS_AND_SHARED: dict[str, tuple[int, int]] = {
    "hopper/bf16/90/128": (64, 227),
    # A window and sinks add code, so they come with the widest heads.
    "hopper+window/bf16/90/128": (64, 227),
    "hopper/bf16/90/96": (128, 227),
    "hopper+window/fp16/90/256": (128, 227),
    "hopper+window/fp16/90/192/128": (128, 227),
    "PORTABLE+window/bf16/80/128": (32, 99),
    "HOPPER/bf16/90/128": (9999, 227),
    "HOPPER/bf16/90/512": (9999, 227),
    "PORTABLE/bf16/80/512": (9999, WIDE_SHARED[2]),
    "FLOAT32/fp32/90/512": (9999, WIDE_SHARED[4]),
}
"""The most spilled registers, and the most shared memory in KiB, of each kernel."""


@pytest.mark.slow
def test_kernels_fit_their_gpus_and_keep_their_products_asynchronous() -> None:
    for report in compiled(*SPILLS_AND_SHARED):
        case = report.kernel.partition(" ")[2]
        spills, shared = SPILLS_AND_SHARED[case]
        assert report.spills <= spills, report
        assert report.shared <= shared << 10, report
        assert report.wgmma > 0 or not case.lower().startswith("hopper") or case.endswith("512"), report
        assert "hopper" not in case or not any("serialized" in remark for remark in report.remarks), report
