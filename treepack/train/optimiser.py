"""The optimiser of a training run.

model --decay_groups--> names of weights that decay, and of all others: biases, norms, states, vectors
run   --make_optimiser--> AdamW with these two groups
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from treepack.memory.offloaded_adamw import OffloadedAdamW
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun

# Devices with one kernel for the whole update; elsewhere torch chooses.
_FUSED_DEVICES = {"cpu", "cuda"}

# Weights of any shape that do not decay, by name: biases (experts have them as matrices) and norms (with one row per
# head in some models) as in transformers, and besides them the states and scales of some families.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)|(^|\.)(A_log|D|scale)$")


def make_optimiser(run: TrainingRun) -> torch.optim.Optimizer:
    """Return AdamW over all trained parameters of the run's model."""
    model = run.loaded.model
    trained, (_, undecayed) = dict(model.named_parameters()), decay_groups(model)
    parameters = [parameter for parameter in trained.values() if parameter.requires_grad]
    return make_adamw(parameters, run.options, undecayed=[trained[name] for name in undecayed])


def decay_groups(model: Any) -> tuple[list[str], list[str]]:
    """Return the names of the trained parameters with weight decay, and of the others.

    Biases, norms and states have none whatever their shape is, and no vector has any.
    """
    groups: tuple[list[str], list[str]] = ([], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module = model.get_submodule(name.rpartition(".")[0])
            # Some embeddings end with a norm, and are named after it.
            is_norm = "Norm" in type(module).__name__ and not isinstance(module, nn.Embedding)
            groups[is_norm or parameter.ndim <= 1 or _UNDECAYED.search(name) is not None].append(name)
    return groups


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


def make_adamw(
    parameters: Sequence[nn.Parameter], options: TrainOptions, *, undecayed: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Return AdamW, without weight decay for `undecayed` and for parameters of one dimension."""
    without = {id(p) for p in (*undecayed, *(p for p in parameters if p.ndim <= 1))}
    groups = [
        {"params": [p for p in parameters if id(p) not in without], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if id(p) in without], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # a model may have no parameter without decay
    if options.offload_optimizer is True:
        return OffloadedAdamW(groups, device=parameters[0].device, lr=options.lr, betas=options.betas)
    # One kernel reads and writes every number once.
    fused = {parameter.device.type for parameter in parameters} <= _FUSED_DEVICES
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused or None)
