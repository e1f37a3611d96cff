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
    check_parallelism(name, trainer.accelerator)  # `accelerate launch` may have set it
    for config in getattr(trainer.model, "peft_config", {}).values():
        if config.is_prompt_learning:
            raise TreepackError(f"{name}: {config.peft_type} adds virtual tokens, which no tree has; use LoRA")
    for note in stop_dropout(trainer.model):
        _log.warning("note: %s: %s", name, note)


def check_parallelism(name: str, *arguments: Any) -> None:
    """Refuse context, sequence and tensor parallelism of accelerate in `arguments`, which may have parallelism_config.

    accelerate divides padded sequences, and exchanges them in attention code that does not support trees.

    Raises:
        TreepackError: naming the option and the remedy.
    """
    for parallel in (getattr(each, "parallelism_config", None) for each in arguments):
        for option in ("cp_size", "sp_size", "tp_size"):
            if (size := getattr(parallel, option, 1)) > 1:
                raise TreepackError(
                    f"{name}: parallelism_config.{option} is {size}, and accelerate's parallelism does not know trees; "
                    f"set it to 1, and share rows by tree_trainer(GRPOTrainer, sequence_ranks={size}), by `treepack "
                    f"train --sequence-ranks {size}`, or in verl by ulysses_sequence_parallel_size={size}"
                )


def trainer_dtype(args: Any) -> torch.dtype | None:
    """Return the dtype of a trainer's autocast, None if it has none."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
