"""Compile the layers of a transformers model, or recompute them in the backward pass, or both.

Neither changes the results of training, except for rounding: compilation saves time, recomputation saves memory and
costs time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from treepack.errors import TreepackError

# Attribute of a model: True if `compile_layers` checkpoints its layers, which the flags of transformers do not show.
_RECOMPUTES = "_treepack_recomputes_layers"


def adapt_layers(model: Any, *, checkpointing: bool, compiled: bool) -> None:
    """Checkpoint or compile the layers, or both, or neither; see `checkpoint_layers` and `compile_layers`.

    Raises:
        TreepackError: if the model's layers cannot be compiled or checkpointed.
    """
    if compiled:
        compile_layers(model, checkpointing=checkpointing)
    elif checkpointing:
        checkpoint_layers(model)


def compile_layers(model: Any, *, checkpointing: bool = False) -> None:
    """Compile everything except attention in every layer with torch.compile, once for rows of all lengths.

    Attention breaks the graph and runs uncompiled. Matrix products keep their precision; the order of sums, and so
    their rounding, may change. With `checkpointing`, each layer is also recomputed in the backward pass.

    Raises:
        TreepackError: if transformers marks no layers in this model.
    """
    layers = find_layers(model)
    if not layers:
        raise TreepackError(f"{type(model).__name__} has no layers to compile; train without --compile")
    for layer in layers:
        forward = torch.compile(layer.forward, dynamic=True)
        # Around the compiled function: a graph break inside a checkpoint region, which is where transformers' own
        # checkpointing would put it, leaves the whole region uncompiled.
        layer.forward = functools.partial(checkpoint, forward, use_reentrant=False) if checkpointing else forward
    setattr(model, _RECOMPUTES, checkpointing)


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        TreepackError: if the model does not support checkpointing.
    """
    if not model.supports_gradient_checkpointing:
        raise TreepackError(f"{type(model).__name__} has no gradient checkpointing; train without it")
    # transformers renamed the method within version 5.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def recomputes(model: Any) -> bool:
    """Return True if the layers are computed again in the backward pass."""
    # transformers renamed the flag within version 5.
    name = "is_activation_checkpointing"
    theirs = getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing
    return bool(theirs or getattr(model, _RECOMPUTES, False))


def find_decoder(causal: Any) -> Any:
    """Return the part of a causal language model that computes its hidden states; None if it has no such part."""
    # Llama 4 keeps it under another name than the one it declares, so that its `base_model` is the model itself.
    if causal.base_model is not causal:
        return causal.base_model
    decoder = getattr(causal, "model", None) if causal.get_decoder() is causal else causal.get_decoder()
    return decoder if isinstance(decoder, nn.Module) else None


def find_layers(model: Any) -> list[nn.Module]:
    """Return the layers that transformers marks as units of recomputation, in order; empty for some models."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def layer_values(config: Any, name: str) -> list[Any]:
    """Return the values of a field of a model's configuration: one, or one of each layer if layers differ in it.

    None stands for a field that the configuration lacks.
    """
    # Where layers differ, the configuration of the whole model refuses to answer. Gemma 4, head_dim -> [256, 512]
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values = [getattr(layer, name, None) for layer in layers]
    # Gemma 3n has a list in one field.
    return [each for value in values for each in (value if isinstance(value, list) else [value])]


def head_widths(config: Any) -> list[int]:
    """Return the different head dimensions of queries and keys by a model's configuration, ascending."""
    default = config.hidden_size // (getattr(config, "num_attention_heads", None) or 1)
    return sorted({width or default for width in layer_values(config, "head_dim")})
