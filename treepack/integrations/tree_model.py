"""Models of trainers: find them in their wrappers, refuse inexact ones, and switch them to tree attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from treepack.attention import IMPLEMENTATIONS, register, resolve
from treepack.errors import TreepackError
from treepack.model.accept.compatibility import check_config
from treepack.model.accept.probe import probe
from treepack.model.layers import head_widths
from treepack.model.stored_weights import check_stored, check_types, prepare_products


def find_causal(model: nn.Module) -> Any:
    """Return the model of transformers inside the wrappers of a trainer.

    Raises:
        TreepackError: if there is none.
    """
    from transformers import PreTrainedModel

    causal = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if causal is None:
        raise TreepackError(f"{type(model).__name__}: contains no model of transformers; pass one, wrapped or not")
    return causal


def use_tree_attention(model: nn.Module, device: torch.device, autocast: torch.dtype | None) -> None:
    """Switch a model of transformers, wrapped or not, to the implementation of tree attention for a trainer's device.

    A named implementation is used, and not auto, so that its schedule is computed once for all layers of a row.

    Args:
        model: the model.
        device: the device on which the trainer runs it.
        autocast: dtype of the autocast under which the trainer runs it, or None.

    Raises:
        TreepackError: if there is no model of transformers inside.
    """
    register()
    causal = find_causal(model)
    config = causal.config.get_text_config()
    # Values with a head dimension of their own, as of latent attention: each layer chooses for itself.
    dims = [(width, width) for width in head_widths(config)]
    is_plain = getattr(config, "v_head_dim", None) in (None, *head_widths(config))
    chosen = resolve("auto", device, autocast or causal.dtype, *dims) if is_plain else "auto"
    causal.set_attn_implementation(IMPLEMENTATIONS[chosen])


def check_model(causal: Any) -> None:
    """Refuse a model that cannot be trained exactly on trees, unless its weights are not here yet.

    Raises:
        TreepackError: naming the reason.
    """
    source = f"{type(causal).__name__} (model type {causal.config.get_text_config().model_type})"
    check_config(causal.config.get_text_config(), source=source)
    check_stored(source, causal.config)
    check_types(source, causal)
    prepare_products(causal)
    if all(not parameter.is_meta and not hasattr(parameter, "ds_id") for parameter in causal.parameters()):
        probe(causal, source=source)
