"""Packed rows in another trainer: a data collator, and the losses of its batches.

    [Batch, ...] --collate--> {"input_ids": [B, T], ...} --the trainer--> compute_loss(model, inputs):

    batch_loss        sum of loss_weight * nll over the rows, like `forward.row_loss` for each row
    batch_logprobs    log-probabilities of the tokens of inputs["terms"], for `losses.objective_loss`

The model is called with everything that the trainer wrapped around it (DistributedDataParallel, the autocast of
accelerate, PEFT), so that hooks on its forward run. The loss is computed inside this forward pass, where the weights of
the output layer are whole, in chunks (`head`). The results are sums, and the trainer divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from treepack.attention import IMPLEMENTATIONS, BatchSchedules, TreePass
from treepack.data.batch import Batch, TermTensors, empty_batch
from treepack.data.joined import concatenate_routes, concatenate_terms
from treepack.errors import TreepackError
from treepack.model.accept.first_batch import check_first_batch
from treepack.model.dropout import check_dropout
from treepack.model.experts.replay import check_routes, use_routes
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.output_head import check_sets, head_replaced
from treepack.model.head.token_loss import CHUNK, filled_temperature, target_metrics, tree_logprobs, weighted_nll
from treepack.sequence.share import sequence_of

_COLUMNS = ("input_ids", "position_ids", "subtree_end", "parent", "scale", "loss_weight")


def collate(batches: Sequence[Batch]) -> dict[str, Any]:
    """Stack B packed rows into one dict, padded to T tokens, the length of the longest; for use as a data collator.

    Padding is the same as in `data.batch`: it attends to itself only and adds nothing to the loss.

    Returns:
        input_ids, position_ids and parent int64 [B, T], with parents as indices within the row; subtree_end and scale
        int32 [B, T]; loss_weight float64 [B, T]; row_id int64 [B]; trajectory_ids, one tuple of names per row. If the
        rows have terms, also "terms": one `TermTensors` for all rows. Its `tokens` are indices into the B * T tokens of
        the batch. Its trajectories come in the order of the rows, as in `trajectory_ids`. If a row has recorded
        experts, also "routes" [B * T, layers, k], which the losses of this file replay.

    Raises:
        TreepackError: if `batches` is empty.
    """
    if not batches:
        raise TreepackError("collate: there is no row; expected at least one Batch")
    length = max(len(batch.input_ids) for batch in batches)
    lengths = [length] * len(batches)
    inputs: dict[str, Any] = {name: torch.stack([_pad(batch, name, length) for batch in batches]) for name in _COLUMNS}
    inputs["row_id"] = torch.tensor([batch.row_id for batch in batches])
    inputs["trajectory_ids"] = [batch.trajectory_ids for batch in batches]
    if any(batch.terms is not None for batch in batches):
        inputs["terms"] = concatenate_terms([batch.terms or _empty_terms() for batch in batches], lengths)
    routes = concatenate_routes(batches, lengths, sum(lengths))
    if routes is not None:
        inputs["routes"] = routes
    return inputs


def _pad(batch: Batch, name: str, length: int) -> Tensor:
    column: Tensor = getattr(batch, name)
    tail: Tensor = getattr(empty_batch(length - len(column)), name).to(column.device)
    # subtree_end [2, 2] padded to 4 tokens: the tail [1, 2] is shifted by 2 -> [2, 2, 3, 4]
    return torch.cat([column, tail + len(column) if name == "subtree_end" else tail])


def _empty_terms() -> TermTensors:
    terms = empty_batch(0, terms=True).terms
    assert terms is not None
    return terms


def batch_loss(model: Any, inputs: dict[str, Any], *, chunk: int = CHUNK) -> Tensor:
    """Return the sum over the targets of all rows of loss_weight * nll, a float64 scalar: `token_loss.weighted_nll`.

    Args:
        model: a causal language model of transformers with tree attention, with the wrappers of the trainer.
        inputs: the result of `collate`, on the model's device.
        chunk: targets whose logits are in memory at a time.

    Raises:
        TreepackError: if the model uses another attention, a dropout is active, its output layer is not a plain linear
            layer, or it cannot be trained exactly for another reason; the first batch of a model checks the last two
            (`first_batch`).
    """
    targets = *_flatten(inputs), inputs["loss_weight"].flatten()
    loss, anchor = _run(model, inputs, lambda states, layer: weighted_nll(states, layer, targets, chunk=chunk))
    total: Tensor = loss + anchor
    return total


def batch_loss_and_metrics(model: Any, inputs: dict[str, Any], *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return `batch_loss`, and the sums of loss_weight times two metrics of its targets: `token_loss.target_metrics`.

    Arguments and errors are as in `batch_loss`. The metrics take one more pass of the output layer.
    """
    targets = *_flatten(inputs), inputs["loss_weight"].flatten()

    def compute(states: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
        return weighted_nll(states, layer, targets, chunk=chunk), target_metrics(states, layer, targets, chunk=chunk)

    (loss, metrics), anchor = _run(model, inputs, compute)
    return loss + anchor, metrics


def batch_logprobs(
    model: Any,
    inputs: dict[str, Any],
    *,
    temperature: float | None = None,
    with_entropies: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [n] of the n tokens of inputs["terms"]; see `token_loss.tree_logprobs`.

    Temperatures and kept sets come from the terms. `temperature` replaces missing ones; it is 1 by default. All other
    arguments and errors are as in `batch_loss` and `token_loss.tree_logprobs`.

    Raises:
        TreepackError: as `batch_loss`, and if the batch has no terms.
    """
    terms = inputs.get("terms")
    if terms is None:
        raise TreepackError(
            "batch_logprobs: the batch has no terms; open the rows with PackedDataset(..., terms=True), and pack "
            "rollouts that have advantages (`treepack advantages`, or trajectories_from_arrays(advantages=...))"
        )
    causal = _find_causal_model(model)
    check_sets(terms.kept_ids, causal, type(causal).__name__)
    targets = terms.tokens, *_flatten(inputs)
    divisor = filled_temperature(terms.temperature, temperature)

    def compute(states: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
        law: dict[str, Any] = {"temperature": divisor, "kept": terms.kept_ids}
        return tree_logprobs(states, layer, targets, **law, with_entropies=with_entropies, chunk=chunk)

    (logprobs, entropies), anchor = _run(model, inputs, compute)
    return logprobs + anchor, entropies


def _flatten(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return input_ids and parent, [B * T] each, with parents as indices into the batch instead of the row."""
    parent = inputs["parent"]
    # B = 2, T = 3: parent [[-1, 0, 1], [-1, 0, 0]] + offset [[0], [3]] -> [-1, 0, 1, -1, 3, 3]; roots keep their -1
    offset = torch.arange(len(parent), device=parent.device)[:, None] * parent.shape[1]
    return inputs["input_ids"].flatten(), torch.where(parent < 0, parent, parent + offset).flatten()


def _run(model: Any, inputs: dict[str, Any], compute: Callable[[Tensor, OutputLayer], Any]) -> tuple[Any, Tensor]:
    """Run the batch; return compute(states [B * T, D], output layer), and a zero attached to all parameters.

    Ranks exchange the gradient of every parameter, so each parameter needs one on every rank. Through the zero, a
    parameter that a row of padding does not use gets a gradient of zero.

    Raises:
        TreepackError: if the model cannot be trained exactly, or its output layer is not whole in the forward pass.
    """
    causal = _find_causal_model(model)
    check_dropout(model)
    columns = {name: inputs[name] for name in ("input_ids", "position_ids", "subtree_end")}
    sequence, share, routes = sequence_of(causal), None, inputs.get("routes")
    if sequence is not None:
        share = sequence.share(inputs["input_ids"].shape[1], len(inputs["input_ids"]))
        columns |= {name: share.cut(columns[name], 1) for name in ("input_ids", "position_ids")}
        columns["tree_pass"] = TreePass(share=share)
    # Layers make their schedules in it when they need them, once for all layers of a kind.
    columns["schedule"] = BatchSchedules(inputs["subtree_end"])
    source = f"{type(causal).__name__} (model type {causal.config.get_text_config().model_type})"
    use_routes(causal, source, None)  # the check runs a different row
    check_first_batch(model, causal, inputs["position_ids"])
    if routes is not None:
        check_routes(causal, source, routes)
        use_routes(causal, source, routes if share is None else share.cut_flat(routes))

    def whole(states: Tensor, layer: OutputLayer) -> Any:
        if len(states) != columns["input_ids"].numel():
            raise TreepackError(
                f"{type(model).__name__}: the model computed {len(states)} tokens for a batch of "
                f"{columns['input_ids'].numel()}; it must run the batch as it is, so use neither DataParallel nor "
                "virtual tokens"
            )
        return compute(states, layer if share is None else replace(layer, share=share))

    # Inside the forward pass of the wrappers, because they gather weights and choose the precision there.
    with head_replaced(causal, whole) as call:
        logits: Tensor = model(**columns, use_cache=False).logits
    return call.result, logits.sum() * 0


def _find_causal_model(model: nn.Module) -> Any:
    """Return the model of transformers inside the wrappers of a trainer.

    Raises:
        TreepackError: if there is none, or it does not use treepack's attention.
    """
    from transformers import PreTrainedModel

    causal = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if causal is None or causal.get_output_embeddings() is None:
        raise TreepackError(
            f"{type(model).__name__}: contains no causal language model of transformers; pass one, wrapped or not"
        )
    attention = causal.config.get_text_config()._attn_implementation
    if attention not in IMPLEMENTATIONS.values():
        raise TreepackError(
            f"{type(causal).__name__}: uses the attention {attention!r}, which ignores subtree_end; load it with "
            "treepack.load_model, or call treepack.register_attention() and set_attn_implementation('treepack_auto')"
        )
    return causal
