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


@pytest.mark.slow
def test_the_hopper_kernels_keep_their_products_asynchronous_and_fit() -> None:
    for report in compiled("hopper/bf16/90/128", "hopper/fp16/90/64", "hopper+window/bf16/90/128"):
        assert report.wgmma > 0, report
        assert not any("serialized" in remark for remark in report.remarks), report
        assert report.spills <= 64, report
        assert report.shared <= 227 << 10, report


@pytest.mark.slow
def test_kernels_of_heads_in_parts_keep_their_products_asynchronous_and_fit() -> None:
    # A window and sinks add code, so they come with the widest heads.
    windows = [f"hopper+window/fp16/90/{dims}" for dims in ("256", "192/128")]
    for report in compiled("hopper/bf16/90/96", "hopper/fp16/90/80", *windows):
        assert report.wgmma > 0, report
        assert not any("serialized" in remark for remark in report.remarks), report
        assert report.spills <= 128, report
        assert report.shared <= 227 << 10, report


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


@pytest.mark.slow
def test_the_portable_kernels_fit_small_gpus_and_hardly_spill() -> None:
    for report in compiled("PORTABLE/bf16/80/64", "PORTABLE+window/bf16/80/128"):
        assert report.spills <= 32, report
        assert report.shared <= 99 << 10, report


@pytest.mark.slow
def test_the_portable_kernels_fit_hopper() -> None:
    for report in compiled("HOPPER/bf16/90/128"):
        assert report.wgmma > 0, report
        assert report.shared <= 227 << 10, report


@pytest.mark.slow
def test_heads_of_512_need_no_more_shared_memory_than_dispatch_asks_for() -> None:
    asked = {"HOPPER/bf16/90/512": 227, "PORTABLE/bf16/80/512": WIDE_SHARED[2], "FLOAT32/fp32/90/512": WIDE_SHARED[4]}
    for report in compiled(*asked):
        assert report.shared <= asked[report.kernel.partition(" ")[2]] << 10, report
