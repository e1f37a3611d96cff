"""Refusals by name before training, and the switch to tree attention, for the classes of `integrations.trl`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from treepack.attention import IMPLEMENTATIONS, register, resolve
from treepack.errors import TreepackError
from treepack.model.compatibility import check_config
from treepack.model.probe import probe


def check_trainer(trainer: Any) -> None:
    """Refuse what treepack does not compute, before training.

    Raises:
        TreepackError: naming the option of TRL and the remedy.
    """
    args, name = trainer.args, type(trainer).__name__
    if getattr(trainer, "_is_vlm", False):
        raise TreepackError(f"{name}: the processing class belongs to a vision-language model; pass a tokenizer")
    if getattr(trainer, "aux_loss_enabled", False):
        raise TreepackError(
            f"{name}: router_aux_loss_coef is {trainer.router_aux_loss_coef}, but the auxiliary loss of experts is not "
            "computed on trees; set router_aux_loss_coef=0"
        )
    if args.use_liger_kernel:
        raise TreepackError(f"{name}: use_liger_kernel replaces parts of the model; set use_liger_kernel=False")
    if getattr(trainer, "use_transformers_continuous_batching", False):
        raise TreepackError(
            f"{name}: use_transformers_continuous_batching generates with an attention of its own; set it to False, or "
            "use_vllm=True"
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if any(getattr(parallel, size, 1) > 1 for size in ("cp_size", "sp_size", "tp_size")):
        raise TreepackError(f"{name}: context, sequence and tensor parallelism cut rows; use data parallelism only")
    for config in getattr(trainer.model, "peft_config", {}).values():
        if config.is_prompt_learning:
            raise TreepackError(f"{name}: {config.peft_type} adds virtual tokens, which no tree has; use LoRA")


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


def use_tree_attention(model: nn.Module, args: Any) -> None:
    """Switch a model of transformers, wrapped or not, to the implementation of tree attention for a trainer's device.

    A named implementation is used, and not auto, so that its schedule is computed once for all layers of a row.

    Args:
        model: the model.
        args: the training arguments, with the device and the precision.

    Raises:
        TreepackError: if there is no model of transformers inside.
    """
    register()
    causal = find_causal(model)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else causal.dtype
    config = causal.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Values with a head dimension of their own, as of latent attention: each layer chooses for itself.
    is_plain = getattr(config, "v_head_dim", head_dim) == head_dim
    chosen = resolve("auto", args.device, dtype, (head_dim, head_dim)) if is_plain else "auto"
    causal.set_attn_implementation(IMPLEMENTATIONS[chosen])


def check_model(causal: Any) -> None:
    """Refuse a model that cannot be trained exactly on trees, unless its weights are not here yet.

    Raises:
        TreepackError: naming the reason.
    """
    source = f"{type(causal).__name__} (model type {causal.config.get_text_config().model_type})"
    check_config(causal.config.get_text_config(), source=source)
    if all(not parameter.is_meta and not hasattr(parameter, "ds_id") for parameter in causal.parameters()):
        probe(causal, source=source)
