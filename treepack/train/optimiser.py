"""The optimiser of a training run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from treepack.memory.offloaded_adamw import OffloadedAdamW
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun

# Devices with one kernel for the whole update; elsewhere torch chooses.
FUSED_DEVICES = {"cpu", "cuda"}


def make_optimiser(run: TrainingRun) -> torch.optim.Optimizer:
    """Return AdamW over all trained parameters of the run's model."""
    return make_adamw([p for p in run.loaded.model.parameters() if p.requires_grad], run.options)


def prepare_states(optimiser: torch.optim.Optimizer) -> None:
    """Allocate the moments of AdamW that the next update needs, so that it cannot run out of memory halfway."""
    if isinstance(optimiser, OffloadedAdamW):
        optimiser.prepare()
        return
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or optimiser.state[parameter]:
                continue
            # As torch makes them in the first update.
            device = parameter.device if group["fused"] else None
            step = torch.zeros((), dtype=torch.float32, device=device)
            moments = [torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2)]
            optimiser.state[parameter].update(step=step, exp_avg=moments[0], exp_avg_sq=moments[1])


def make_adamw(parameters: Sequence[nn.Parameter], options: TrainOptions) -> torch.optim.Optimizer:
    """Return AdamW, without weight decay for parameters of one dimension (biases and norms)."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # a model may have no parameter of one dimension
    if options.offload_optimizer is True:
        return OffloadedAdamW(groups, device=parameters[0].device, lr=options.lr, betas=options.betas)
    # One kernel reads and writes every number once.
    fused = {parameter.device.type for parameter in parameters} <= FUSED_DEVICES
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused or None)
