"""Packed rows for other people's trainers: what a data collator returns, and the losses of what it returned.

    [Batch, ...] --collate--> {"input_ids": [B, T], ...} --their trainer--> compute_loss(model, inputs):

    batch_loss        sum of loss_weight * nll over the rows, as `model.row_loss` of each
    batch_logprobs    log-probabilities of the tokens of inputs["terms"], for `objectives.objective_loss`

The model is called as the trainer wrapped it (DistributedDataParallel, accelerate's autocast, PEFT), so that hooks on
its forward run; the loss is made of its last hidden states, in chunks, and its own logits are those of one token. What
a trainer divides by is its own affair: these are sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from treepack.attention import IMPLEMENTATIONS, prepare
from treepack.data.batch import Batch, TermTensors, empty_batch
from treepack.errors import TreepackError
from treepack.model.loss import CHUNK, tree_logprobs, weighted_nll

_COLUMNS = ("input_ids", "position_ids", "subtree_end", "parent", "scale", "loss_weight")


def collate(batches: Sequence[Batch]) -> dict[str, Any]:
    """B packed rows as one dict, padded to T tokens, the longest of them; a data collator, which takes lists of rows.

    Padding is that of `batch`: it sees only itself and counts for nothing.

    Returns:
        input_ids, position_ids and parent int64 [B, T], parent counting within its row; subtree_end and scale int32
        [B, T]; loss_weight float64 [B, T]; row_id int64 [B]. If the rows hold terms, also "terms": one `TermTensors`
        of all rows: its `tokens` count within the B * T tokens of the batch, and its trajectories are those of the
        first row, then of the second, and so on.

    Raises:
        TreepackError: there is no row.
    """
    if not batches:
        raise TreepackError("collate: there is no row; expected at least one Batch")
    length = max(len(batch.input_ids) for batch in batches)
    found: dict[str, Any] = {
        name: torch.stack([_padded(batch, name, length) for batch in batches]) for name in _COLUMNS
    }
    found["row_id"] = torch.tensor([batch.row_id for batch in batches])
    if any(batch.terms is not None for batch in batches):
        found["terms"] = _joined([batch.terms or _terms_of_none() for batch in batches], length)
    return found


def _padded(batch: Batch, name: str, length: int) -> Tensor:
    column: Tensor = getattr(batch, name)
    tail: Tensor = getattr(empty_batch(length - len(column)), name)
    return torch.cat([column, tail + len(column) if name == "subtree_end" else tail])


def _terms_of_none() -> TermTensors:
    terms = empty_batch(0, terms=True).terms
    assert terms is not None
    return terms


def _joined(rows: Sequence[TermTensors], length: int) -> TermTensors:
    """The terms of rows of `length` tokens each, side by side; a column that a row with terms lacks is left out."""
    columns: dict[str, list[Tensor] | None] = {field.name: [] for field in fields(TermTensors)}
    shift = {"tokens": 0, "index": 0, "trajectory": 0, "group": 0}
    for terms in rows:
        for name in columns:
            values, so_far = getattr(terms, name), columns[name]
            if values is None:
                columns[name] = None
            elif so_far is not None:
                so_far.append(values + shift[name] if name in shift else values)
        shift["tokens"] += length
        shift["index"] += len(terms.tokens)
        shift["trajectory"] += len(terms.group)
        shift["group"] += len(terms.group)  # more than the codes of its groups: groups are compared within a row
    joined: dict[str, Any] = {name: None if values is None else torch.cat(values) for name, values in columns.items()}
    return TermTensors(**joined)


def batch_loss(model: Any, inputs: dict[str, Any], *, chunk: int = CHUNK) -> Tensor:
    """Sum over the targets of all rows of loss_weight * nll, a float64 scalar; see `loss.weighted_nll`.

    Args:
        model: a causal language model of transformers with tree attention, in whatever the trainer wrapped it.
        inputs: from `collate`, on the model's device.
        chunk: targets whose logits exist at a time.

    Raises:
        TreepackError: the model attends through something else, or its output layer is no plain linear layer.
    """
    states, head, anchor = _states(model, inputs)
    input_ids, parent = _flat(inputs)
    targets = input_ids, parent, inputs["loss_weight"].flatten()
    return weighted_nll(states, head.weight, targets, bias=head.bias, chunk=chunk) + anchor


def batch_logprobs(model: Any, inputs: dict[str, Any], *, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [n] of the tokens of inputs["terms"], each once; see `loss.tree_logprobs`.

    Arguments and errors are those of `batch_loss`.
    """
    states, head, anchor = _states(model, inputs)
    input_ids, parent = _flat(inputs)
    tokens = inputs["terms"].tokens
    logprobs, entropies = tree_logprobs(states, head.weight, tokens, input_ids, parent, bias=head.bias, chunk=chunk)
    return logprobs + anchor, entropies


def _flat(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """input_ids and parent [B * T], parent counting within the batch."""
    parent = inputs["parent"]
    offset = torch.arange(len(parent), device=parent.device)[:, None] * parent.shape[1]
    return inputs["input_ids"].flatten(), torch.where(parent < 0, parent, parent + offset).flatten()


def _states(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states [B * T, D] after the final norm, the output layer, and a zero that depends on all parameters.

    Ranks add up their gradients in step, so a parameter that a row of padding does not need gets a gradient of zero.
    """
    causal = _causal(model)
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TreepackError(
            f"{type(causal).__name__}: its output layer is a {type(head).__name__}; expected a plain linear layer, so "
            "leave adapters off it"
        )
    impl = causal.config.get_text_config()._attn_implementation.removeprefix("treepack_")
    # "auto" is worked out, and the schedule made, in every layer; a name costs it once.
    schedule = None if impl == "auto" else prepare(inputs["subtree_end"], impl)
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(causal.forward).parameters else {}
    seen: list[Tensor] = []
    hook = causal.base_model.register_forward_hook(lambda _, __, output: seen.append(output.last_hidden_state))
    try:
        output = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            subtree_end=inputs["subtree_end"],
            schedule=schedule,
            use_cache=False,
            **options,
        )
    finally:
        hook.remove()
    return seen[0].flatten(0, 1), head, output.logits.sum() * 0


def _causal(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    causal = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if causal is None or causal.get_output_embeddings() is None:
        raise TreepackError(f"{type(model).__name__}: is no causal language model of transformers")
    attention = causal.config.get_text_config()._attn_implementation
    if attention not in IMPLEMENTATIONS.values():
        raise TreepackError(
            f"{type(causal).__name__}: attends through {attention!r}, which takes no notice of subtree_end; load it "
            "by treepack.load_model, or by attn_implementation='treepack_auto' after treepack.register_attention()"
        )
    return causal
