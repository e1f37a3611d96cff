"""GRPOTrainer and RLOOTrainer of TRL with every shared prefix computed once.

    TRL                                                  the class that `policy_trainer` returns
    rollouts, rewards, advantages
    shuffle, cut into micro-batches      --regroup-->    the same samples in each optimiser step, siblings adjacent
    log-probabilities and entropies      <--rows-----    of the policy, the old policy and the reference
    loss, KL, masks, metrics, optimiser, generation

One method of a trainer turns a padded batch into log-probabilities and entropies of the same shape. Only this method
and the order of samples inside an optimiser step change, so every loss of TRL works as it is.

An order matters if the loss has a mean over one micro-batch. `_fixed_order` names these options; TRL's order stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from treepack.attention import allow_generation
from treepack.errors import TreepackError
from treepack.integrations.tree_model import find_causal, use_tree_attention
from treepack.integrations.trl_checks import check_parallelism, check_trainer, trainer_dtype
from treepack.integrations.trl_ranks import join_padded, own_values, sequence_group
from treepack.integrations.versions import check_program
from treepack.online import OnlineOptions, batch_statistics, plan_batch
from treepack.sequence.share import share_rows

_Trainer = TypeVar("_Trainer")
_MicroBatch = dict[str, Any]  # columns of the same samples: tensors [B, ...], lists of B, scalars, or None

# Methods that the subclass overrides, with the arguments by which TRL asks for trained tokens and entropies, and fields
# that it reads.
_METHODS = (
    "_prepare_inputs",
    "_get_per_token_logps_and_entropies(logits_to_keep)",
    "_get_per_token_logps_and_entropies(compute_entropy)",
)
_FIELDS = ("model", "ref_model", "args", "accelerator", "temperature", "_buffered_inputs", "_step", "_metrics")

# Losses whose sum over an optimiser step does not depend on how its samples are cut into micro-batches of equal size.
# grpo, sapo, luspo: a mean over samples. dr_grpo: a sum over samples and a constant. dapo, cispo, vespo: a sum over
# tokens, divided by the tokens of the whole generation batch. bnpo is a mean over the tokens of a micro-batch.
_ORDER_FREE = frozenset({"grpo", "sapo", "luspo", "dr_grpo", "dapo", "cispo", "vespo"})


def policy_trainer(
    base: type[_Trainer], options: OnlineOptions | None = None, *, sequence_ranks: int = 1
) -> type[_Trainer]:
    """Return a subclass of TRL's GRPOTrainer or RLOOTrainer that computes every shared prefix once.

    The subclass takes the arguments of `base`. It switches the model to tree attention; generation with the same model
    works. The model must be one that `load_model` accepts.

    Args:
        base: a class of trl 1.16, or a subclass of it that keeps `_get_per_token_logps_and_entropies`.
        options: how rows are planned and computed. By default, rows are computed again in the backward pass, unless
            the model does this alone (gradient checkpointing).
        sequence_ranks: neighbouring ranks that compute each row together, each a part of its tokens.

    Raises:
        TreepackError: another version of trl; or by the subclass, for options that treepack does not compute.
    """
    check_program("trl", base, _METHODS, user="tree_trainer")

    class TreeTrainer(base):  # type: ignore[valid-type,misc]
        _buffered_inputs: Any  # TRL's micro-batches of the last generation

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            check_parallelism(type(self).__name__, *args, *kwargs.values())
            super().__init__(*args, **kwargs)
            check_program("trl", self, _FIELDS, user=type(self).__name__)
            check_trainer(self)
            # Under gradient checkpointing, TRL too keeps the states between layers of all tokens of a micro-batch.
            self._tree_options = options or OnlineOptions(recompute=not self.args.gradient_checkpointing)
            self._sequence_group = sequence_group(type(self).__name__, sequence_ranks)
            for model in (self.model, self.ref_model):
                if model is not None:
                    use_tree_attention(model, self.args.device, trainer_dtype(self.args))
                    allow_generation(model)
                    share_rows(find_causal(model), self._sequence_group)

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            buffered = self._buffered_inputs
            inputs = super()._prepare_inputs(generation_batch)
            if self._buffered_inputs is buffered or _fixed_order(self) is not None:
                return inputs
            # Micro-batches of one optimiser step are consecutive, and `window` divides both numbers. A generation of 6
            # micro-batches has the windows 0-1, 2-3, 4-5; every step of 4 is made of two windows.
            window = gcd(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
            self._buffered_inputs = regroup(self._buffered_inputs, window)
            return self._buffered_inputs[self._step % self.args.steps_per_generation]

        def _get_per_token_logps_and_entropies(
            self,
            model: nn.Module,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            batch_size: int | None = None,
            compute_entropy: bool = False,
            compute_aux_loss: bool = False,
            **others: Any,
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            # Without a graph, rows are computed one by one, so `batch_size`, TRL's limit of memory, is not needed.
            _refuse_inputs(others, type(self).__name__)
            scored = attention_mask.bool().clone()
            scored[:, :-logits_to_keep] = False
            wanted = replace(self._tree_options, with_entropies=compute_entropy)
            ids, mask, place = input_ids, attention_mask, None
            if self._sequence_group is not None:
                (ids, mask, scored), place = join_padded((ids, mask, scored), self._sequence_group)
            rows = plan_batch(ids, mask, scored, wanted, temperature=self.temperature)
            self._metrics["train" if self.model.training else "eval"]["tree/flat_over_computed_tokens"].append(
                rows.tokens_flat / max(rows.num_tokens, 1)
            )
            with self.accelerator.autocast():
                logprobs, entropies = batch_statistics(model, rows.to(input_ids.device), wanted)
            values = [logprobs, entropies] if compute_entropy else [logprobs]
            if place is not None:
                values = own_values(values, place, self._sequence_group)
            kept = [each[:, -logits_to_keep:] for each in values]
            return kept[0], kept[1] if compute_entropy else None, None

    TreeTrainer.__name__ = TreeTrainer.__qualname__ = f"Tree{base.__name__}"
    return TreeTrainer


def _fixed_order(trainer: Any) -> str | None:
    """Return the option of TRL under which the loss depends on the cut into micro-batches, or None."""
    loss = getattr(trainer, "loss_type", None)
    if loss is not None and loss not in _ORDER_FREE:
        return f"loss_type={loss!r}"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "entropy_coef"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile"
    return None


def regroup(batches: Sequence[_MicroBatch], window: int) -> list[_MicroBatch]:
    """Sort the samples of each `window` consecutive micro-batches by their tokens, and cut them again.

    Samples with a common prefix are then neighbours. Every sample stays in its window, and sizes stay.

    Args:
        batches: micro-batches of TRL, with prompt_ids, prompt_mask, completion_ids and completion_mask.
        window: micro-batches of which all belong to the same optimiser step.
    """
    result: list[_MicroBatch] = []
    for start in range(0, len(batches), window):
        group = batches[start : start + window]
        order = np.array(_sibling_order(group))
        size = len(order) // len(group)
        result += [
            {key: _pick(group, key, order[i : i + size]) for key in group[0]} for i in range(0, len(order), size)
        ]
    return result


def _sibling_order(group: Sequence[_MicroBatch]) -> list[int]:
    """Return the indices of the samples of `group` in the order of their tokens."""
    keys: list[bytes] = []
    for batch in group:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1).cpu().numpy()
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool().cpu().numpy()
        # Big-endian bytes are in the order of the numbers: [1, 2] < [1, 2, 0] < [2].
        keys += [row[real].astype(">u4").tobytes() for row, real in zip(ids, mask, strict=True)]
    return sorted(range(len(keys)), key=lambda i: keys[i])


def _pick(group: Sequence[_MicroBatch], key: str, chosen: np.ndarray) -> Any:
    """Return the values of a column for the chosen samples; a scalar of the generation batch stays as it is."""
    first = group[0][key]
    if first is None or (isinstance(first, Tensor) and first.ndim == 0):
        return first
    if isinstance(first, Tensor):
        return torch.cat([batch[key] for batch in group])[torch.from_numpy(chosen).to(first.device)]
    values = [value for batch in group for value in batch[key]]
    return [values[i] for i in chosen]


def _refuse_inputs(others: dict[str, Any], owner: str) -> None:
    """Refuse images and other inputs beside token ids.

    Raises:
        TreepackError: naming the input.
    """
    for name, value in others.items():
        if value is not None:
            raise TreepackError(f"{owner}: the batch has {name}; only text is computed on trees")
