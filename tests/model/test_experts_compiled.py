"""The kernels of experts, compiled for GPUs that this machine lacks: registers, shared memory, instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ahead_of_time import Report, read
from support.paths import ROOT

triton = pytest.importorskip("triton")

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="this Triton comes without ptxas"),
]


def compiled(config: str, capability: int) -> list[Report]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    command = [sys.executable, "tests/support/experts_ahead_of_time.py", config, str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = read(done.stdout)
    assert len(reports) == (9 if config == "HOPPER" else 4)
    return reports


def test_hopper_kernels_keep_their_products_asynchronous_and_fit() -> None:
    for report in compiled("HOPPER", 90):
        assert report.wgmma > 0, report
        assert not any("serialized" in remark for remark in report.remarks), report
        assert report.spills == 0, report
        assert report.shared <= 227 << 10, report


@pytest.mark.parametrize("capability", [80, 120])
def test_kernels_for_other_gpus_fit_small_ones(capability: int) -> None:
    for report in compiled("PORTABLE", capability):
        assert report.spills == 0, report
        assert report.shared <= 99 << 10, report
