"""TRL's DPOTrainer with every shared prefix computed once: the two answers of a pair share their prompt.

    padded batch [2B, L]  --plan_batch-->  one row [T]  --layers of the model-->  states [T, D]
    states that predict each token [2B, L, D]  --TRL's fused output layer, losses, metrics-->  loss

The answers of a pair are different tokens, so the output layer has nothing to share. Only the layers before it run on
the row, inside TRL's own forward pass: all losses, reference models and metrics of TRL work as they are, and so do
DistributedDataParallel, FSDP2 and adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from treepack.attention import BatchSchedules
from treepack.errors import TreepackError
from treepack.integrations.tree_model import check_model, find_causal, use_tree_attention
from treepack.integrations.trl_checks import check_parallelism, check_trainer, trainer_dtype
from treepack.integrations.versions import check_program
from treepack.model.accept.first_batch import check_positions
from treepack.model.layers import find_decoder
from treepack.online import OnlineBatch, OnlineOptions, plan_batch

_Trainer = TypeVar("_Trainer")


def share_prefixes(
    causal: Any, *, options: OnlineOptions | None = None, planned: Callable[[OnlineBatch], None] | None = None
) -> None:
    """Let the layers of a causal language model compute a padded batch on rows that share prefixes.

    Afterwards a forward pass without a cache still takes input_ids and attention_mask [B, L] and gives the same states
    [B, L, D] and logits. The state of the last token of a sequence, which predicts nothing, is 0. The attention of the
    model must be treepack's.

    Args:
        causal: a causal language model of transformers, without wrappers.
        options: how the row is planned. `capacity` is not used, because all ranks must run the layers equally often: a
            batch is one row.
        planned: called with each row before it runs.

    Raises:
        TreepackError: by the forward pass, if it generates, or gets positions; or if the model cannot compute the
            positions of a sequence exactly.
    """
    layers = find_decoder(causal)
    original = layers.forward

    @wraps(original)
    def forward(input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **others: Any) -> Any:
        if others.get("subtree_end") is not None:
            return original(input_ids=input_ids, attention_mask=attention_mask, **others)
        if input_ids is None or others.get("past_key_values") is not None or others.get("use_cache") is not False:
            raise TreepackError(
                f"{type(causal).__name__}: computes padded batches on trees, so call it with input_ids and "
                "use_cache=False, and generate with another copy of the model"
            )
        if others.pop("position_ids", None) is not None:
            raise TreepackError(
                f"{type(causal).__name__}: counts the positions of each sequence, so call it without position_ids"
            )
        plan = _plan_row(input_ids, attention_mask, options or OnlineOptions())
        check_positions(plan.rows[0].position_ids, causal, type(causal).__name__)
        if planned is not None:
            planned(plan)
        return _states_of(original, plan, input_ids.shape, others)

    layers.forward = forward


def _plan_row(input_ids: Tensor, attention_mask: Tensor | None, options: OnlineOptions) -> OnlineBatch:
    """Return the plan of a padded batch as one row, on the device of the ids."""
    # As long as the batch: every plan is one row.
    options = replace(options, capacity=input_ids.numel())
    return plan_batch(input_ids, attention_mask, None, options).to(input_ids.device)


def _states_of(original: Any, plan: OnlineBatch, shape: torch.Size, others: dict[str, Any]) -> Any:
    """Return the output of the layers for a padded batch of `shape` [2B, L], with states computed on one row."""
    (row,) = plan.rows
    assert row.terms is not None
    columns: dict[str, Any] = {name: getattr(row, name)[None] for name in ("input_ids", "position_ids", "subtree_end")}
    output = original(**columns, schedule=BatchSchedules(row.subtree_end), **others)
    states = output.last_hidden_state[0]  # [T, D]
    # The state that predicts token j of a sequence goes to place j - 1, where the output layer expects it. No sequence
    # scores its first token, so j - 1 is a place of the same sequence.
    sources = row.parent.index_select(0, row.terms.tokens).index_select(0, row.terms.index)
    flat = states.new_zeros(shape.numel(), states.shape[1])
    output.last_hidden_state = flat.index_copy(0, plan.places - 1, states.index_select(0, sources)).view(*shape, -1)
    return output


def pair_trainer(base: type[_Trainer], options: OnlineOptions | None = None) -> type[_Trainer]:
    """Return a subclass of TRL's DPOTrainer that computes every shared prefix of a batch once.

    The subclass takes the arguments of `base`, and the memory of one row of all pairs of a micro-batch.

    Raises:
        TreepackError: by the subclass, for options that treepack does not compute.
    """
    check_program("trl", base, ("compute_loss",), user="tree_trainer")

    class PairTrainer(base):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            check_parallelism(type(self).__name__, *args, *kwargs.values())
            super().__init__(*args, **kwargs)
            check_program("trl", self, ("model", "ref_model", "args", "_metrics"), user=type(self).__name__)
            check_trainer(self)
            for model, planned in ((self.model, self._note_tokens), (self.ref_model, None)):
                if model is not None:
                    use_tree_attention(model, self.args.device, trainer_dtype(self.args))
                    check_model(find_causal(model))
                    share_prefixes(find_causal(model), options=options, planned=planned)

        def _note_tokens(self, plan: OnlineBatch) -> None:
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["tree/flat_over_computed_tokens"].append(plan.tokens_flat / max(plan.num_tokens, 1))

    PairTrainer.__name__ = PairTrainer.__qualname__ = f"Tree{base.__name__}"
    return PairTrainer
