"""The memory of plans that a run has not tried, for `train.retry`, which compares them with free memory.

measured pass, rows --PlanForecast.num_bytes--> bytes
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from treepack.carry.smaller_plan import RunPlan
from treepack.memory.pass_memory import ModelProbe
from treepack.train.setup.run_plan import RunRows, pass_sizes


@dataclass(frozen=True)
class PlanForecast:
    """The measurement from which the first plan of a run was chosen.

    `moved` bytes of a layer's token leave the GPU, and `whole` are the bytes of all weights and gradients.
    """

    probe: ModelProbe
    rows: RunRows
    moved: int
    whole: int = 0

    def as_record(self) -> dict[str, Any]:
        """Return the numbers that rows do not have, as JSON values."""
        return {"probe": asdict(self.probe), "moved": self.moved, "whole": self.whole}

    def num_bytes(self, plan: RunPlan, longest: int | None = None) -> int | None:
        """Return the peak of a plan beside weights, gradients and optimiser; None if rows of it run in pieces.

        `longest` is the number of tokens of the longest row, by default of the rows that are trained.
        """
        rows = self.rows if longest is None else replace(self.rows, longest=longest, longest_of_all=longest)
        if plan.carry is not None and rows.longest_of_all > plan.carry:
            return None
        tokens = pass_sizes(rows, plan.pass_tokens)[0]
        moved = self.moved if plan.offload_checkpoints else 0
        whole = self.whole if plan.whole_weights else 0
        return whole + self.probe.pass_bytes(tokens, plan.checkpoint_layers, plan.loss_chunk, moved=moved)
