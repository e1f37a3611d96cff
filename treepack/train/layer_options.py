"""The options of a run about layers, applied to the layers of a model."""

from __future__ import annotations

from typing import Any

import torch

from treepack.memory.offload import Offload
from treepack.model.layers import adapt_layers
from treepack.train.options import TrainOptions


def adapt(causal: Any, options: TrainOptions, device: torch.device) -> None:
    """Compile, recompute and offload the layers of a model as the options say; "auto" recomputes all for now.

    Raises:
        TreepackError: as `layers.adapt_layers`.
    """
    count = options.checkpoint_layers
    adapt_layers(
        causal,
        checkpointing=options.recomputes,
        compiled=options.compile,
        recomputed=count if isinstance(count, int) else None,
        offload=Offload(device) if options.offload_checkpoints else None,
    )
