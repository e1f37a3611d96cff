"""Checks before training by the classes of `integrations.trl`: refusals, and dropouts that are set to 0."""

from __future__ import annotations

import logging
from typing import Any

import torch

from treepack.errors import TreepackError
from treepack.model.dropout import stop_dropout

_log = logging.getLogger("treepack")


def check_trainer(trainer: Any) -> None:
    """Refuse what treepack does not compute, before training, and set every dropout to 0 with a note.

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
    for note in stop_dropout(trainer.model):
        _log.warning("note: %s: %s", name, note)


def trainer_dtype(args: Any) -> torch.dtype | None:
    """Return the dtype of a trainer's autocast, None if it has none."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
