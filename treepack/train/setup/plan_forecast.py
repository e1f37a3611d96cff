"""The memory of a run's next steps: bytes that a plan needs, against bytes that are free.

measured pass, rows --PlanForecast.num_bytes--> bytes of a plan that the run has not tried
meter, plan --StepMemory--> `train.retry` compares them before each step
"""

from __future__ import annotations

from dataclasses import dataclass

from treepack.memory.device_memory import MemoryMeter
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


@dataclass(frozen=True)
class StepMemory:
    """The memory of the device on which a run computes its steps.

    `needed` is the peak of its plan in bytes beside weights, gradients and optimiser, 0 if it was not measured. Then
    there is no `forecast` either.
    """

    meter: MemoryMeter
    needed: int = 0
    forecast: PlanForecast | None = None

    @property
    def margin(self) -> int:
        """Bytes that stay free for fragments and the error of the estimate: 8 % of the device."""
        return int(0.08 * self.meter.total)
