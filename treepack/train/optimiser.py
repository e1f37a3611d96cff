"""The optimiser of a training run."""

from __future__ import annotations

import torch

from treepack.train.run import TrainingRun


def make_optimiser(run: TrainingRun) -> torch.optim.AdamW:
    """Return AdamW over all trained parameters, without weight decay for those of one dimension (biases and norms)."""
    options, parameters = run.options, [p for p in run.loaded.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # a model may have no parameter of one dimension
    fused = run.loaded.device.type == "cuda" and not options.cpu_offload
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=fused)
