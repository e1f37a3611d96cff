"""The benchmark of hybrid models: its rows and parts, and a dry run on the CPU."""

from __future__ import annotations

import hybrid_step
import pytest

import support.interpreter  # noqa: F401
from treepack.recurrent.kernels import convolution, states


def test_every_kernel_of_the_room_belongs_to_the_recurrent_part() -> None:
    names = hybrid_step.kernel_names("treepack.recurrent")
    own = {name for module in (convolution, states) for name in vars(module) if name.endswith("_kernel")}
    assert len(own) >= 6
    assert {hybrid_step.part_of(name, names, {"_forward_kernel"}) for name in own} == {"recurrent"}


@pytest.mark.slow
def test_a_dry_run_of_steps_has_equal_gradients_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    hybrid_step.main(["--dry-run"])  # raises if losses or gradients differ
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| star | 44 / 64 |")]
    assert len(rows) == 1
