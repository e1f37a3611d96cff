"""The first stage of opening: the device and the precision of a command that runs a model.

options with "auto" --choose_compute--> ComputeSetting(cuda:0, bf16)       attention that cannot run is refused here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from treepack.attention import resolve
from treepack.model.adapters.adapter_targets import ROUTERS
from treepack.model.experts.lora import runs_ours
from treepack.model.layers import find_layers
from treepack.train.options import TrainOptions
from treepack.train.ranks import find_device, find_dtype
from treepack.train.scoring_options import CriticOptions, ScoreOptions


@dataclass(frozen=True)
class ComputeSetting:
    """The device, and "fp32" or "bf16": float32 weights, with "bf16" under autocast."""

    device: torch.device
    dtype: str

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast; None if nothing runs under it."""
        return torch.bfloat16 if self.dtype == "bf16" else None

    def lower_precision(self) -> torch.autocast:
        """Return the autocast context of one forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16")

    def lower_products(self, causal: Any) -> None:
        """Keep the frozen weights of the products of layers in the dtype of autocast, under which all later passes run.

        Autocast would cast them in every pass, so the results have the same bits, with half of the memory of float32.
        DoRA reads norms of the weights, so its base stays as it is.
        """
        if self.autocast is None or any(getattr(each, "lora_magnitude_vector", None) for each in causal.modules()):
            return
        for name, module in (each for layer in find_layers(causal) for each in layer.named_modules()):
            # Some routers are outside of autocast.
            linear = type(module) is nn.Linear and ROUTERS.isdisjoint(name.split("."))
            # Biases of experts are added in float32.
            own = module.parameters(recurse=False) if linear or runs_ours(module) else ()
            for parameter in own:
                if not parameter.requires_grad and parameter.dtype == torch.float32 and (linear or parameter.ndim == 3):
                    parameter.data = parameter.data.to(self.autocast)


def choose_compute(
    options: TrainOptions | ScoreOptions | CriticOptions, *, weights: torch.dtype | None = None
) -> ComputeSetting:
    """Return the device and the dtype of the options, before any data is opened or a model is loaded.

    Args:
        options: device, dtype and attention.
        weights: the dtype in which attention computes, by default that of the setting.

    Raises:
        TreepackError: the device is missing, or it cannot run the implementation of attention in this dtype.
    """
    device = find_device(options.device)
    setting = ComputeSetting(device, find_dtype(options.dtype, device))
    if options.attention != "auto":  # the head dimensions are checked when the model is loaded
        resolve(options.attention, device, weights or setting.autocast or torch.float32)
    return setting
