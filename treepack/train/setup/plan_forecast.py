"""The memory of plans that a run has not tried, for `train.retry`, which compares them with free memory.

measured pass, rows --PlanForecast.num_bytes--> bytes
"""

from __future__ import annotations

from dataclasses import dataclass

from treepack.train.setup.run_plan import ModelProbe, RunPlan, RunRows, pass_sizes


@dataclass(frozen=True)
class PlanForecast:
    """The measurement from which the first plan of a run was chosen; `moved` bytes of a layer's token leave the GPU."""

    probe: ModelProbe
    rows: RunRows
    moved: int

    def num_bytes(self, plan: RunPlan) -> int | None:
        """Return the peak of a plan beside weights, gradients and optimiser; None if rows of it run in pieces."""
        if plan.carry is not None and self.rows.longest_of_all > plan.carry:
            return None
        tokens = pass_sizes(self.rows, plan.pass_tokens)[0]
        moved = self.moved if plan.offload_checkpoints else 0
        return self.probe.pass_bytes(tokens, plan.checkpoint_layers, plan.loss_chunk, moved=moved)
