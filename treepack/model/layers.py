"""The layers of a transformers model, compiled, recomputed in the backward pass, both or neither.

Both leave the numbers of training as they are, up to rounding: they trade memory and time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from treepack.errors import TreepackError

_RECOMPUTES = "_treepack_recomputes_layers"  # on a model: compiled layers are checkpointed here, not by transformers


def adapt_layers(model: Any, *, checkpointing: bool, compiled: bool) -> None:
    """Checkpoint the layers, compile them, both or neither; see `checkpoint_layers` and `compile_layers`."""
    if compiled:
        compile_layers(model, checkpointing=checkpointing)
    elif checkpointing:
        checkpoint_layers(model)


def compile_layers(model: Any, *, checkpointing: bool = False) -> None:
    """Have torch.compile fuse what is not attention in every layer, once for rows of every length.

    Attention runs as it is, in a break of the graph. Products keep their precision; sums may be rounded in another
    order than without. With `checkpointing` a layer is recomputed in the backward pass, around what is compiled:
    transformers' own checkpointing may lie inside, where nothing would be.

    Raises:
        TreepackError: if transformers marks no layers in this model.
    """
    layers = find_layers(model)
    if not layers:
        raise TreepackError(f"{type(model).__name__} has no layers to compile; train without --compile")
    for layer in layers:
        forward = torch.compile(layer.forward, dynamic=True)
        layer.forward = functools.partial(checkpoint, forward, use_reentrant=False) if checkpointing else forward
    setattr(model, _RECOMPUTES, checkpointing)


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        TreepackError: if the model has no checkpointing.
    """
    if not model.supports_gradient_checkpointing:
        raise TreepackError(f"{type(model).__name__} has no gradient checkpointing; train without it")
    # transformers renamed it within version 5.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def recomputes(model: Any) -> bool:
    """Whether the layers are computed again in the backward pass."""
    # transformers renamed it within version 5.
    name = "is_activation_checkpointing"
    theirs = getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing
    return bool(theirs or getattr(model, _RECOMPUTES, False))


def find_layers(model: Any) -> list[nn.Module]:
    """The layers that transformers marks as units of recomputation, in order; none in some models."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]
