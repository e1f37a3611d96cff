"""Forward passes of packed rows: from a batch to hidden states, log-probabilities or a loss.

    Batch --prepare_batch--> Batch with the attention's schedule, on the model's device
          --hidden_states--> [T, D] --row_loss-------> scalar: sum of loss_weight * nll
                                    --row_logprobs---> log-probabilities and entropies of chosen tokens
                                    --row_values-----> values of the states after chosen tokens, of a critic
                                    --row_objective--> scalar: the row's part of an objective over terms
                                    --pass_loss------> either loss of joined rows (`data.joined`), and that of each row

The logits of a row never exist as a whole: `model.head.output_head` applies the output layer to the hidden states in
chunks. `model.collation` has the counterparts for models that another trainer has wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from treepack.attention import IMPLEMENTATIONS, Kept, Schedules, TreePass
from treepack.data.batch import Batch
from treepack.errors import TreepackError
from treepack.model.accept.first_batch import check_positions
from treepack.model.dropout import check_dropout
from treepack.model.experts.replay import check_routes, use_routes
from treepack.model.foreign_errors import one_line
from treepack.model.head.output_head import OutputLayer, head_replaced
from treepack.model.head.token_loss import CHUNK
from treepack.model.layers import find_decoder, recomputes, takes_packed
from treepack.model.loaded import LoadedModel
from treepack.model.objectives.objective import Objective
from treepack.model.objectives.term_objective import PassLoss, TermObjective, loss_temperature, require_value_head
from treepack.model.text_half import check_text


def prepare_batch(loaded: LoadedModel, batch: Batch) -> Batch:
    """Return the row on the model's device, with the schedules of the model's attention.

    Raises:
        TreepackError: if the model cannot compute positions of the row exactly, has no vision tower for its images, or
            cannot replay its recorded routes.
    """
    check_positions(batch.position_ids, loaded.causal, loaded.source)
    check_text(loaded.causal, batch.input_ids, loaded.source)
    if batch.routes is not None:
        check_routes(loaded.causal, loaded.source, batch.routes)
    # Before the move: from a tensor on the CPU the schedule is computed without waiting for the GPU.
    schedules = Schedules(batch.subtree_end, device=loaded.device, varlen=loaded.varlen)
    made = {
        kind.reach: schedules.of(loaded.attention, kind.reach, varlen=loaded.varlen and kind.is_plain)[1]
        for kind in sorted(set(loaded.kinds), key=str)
    }
    if takes_packed(loaded.causal):
        schedules.pack(made)
    return replace(batch.to(loaded.device), schedule=schedules)


def hidden_states(loaded: LoadedModel, batch: Batch, **options: Any) -> Tensor:
    """Return the hidden states [T, D] of a packed row, after the final norm.

    A batch without a schedule is prepared first. `options` are further arguments of the model.

    Raises:
        TreepackError: if positions of the row are beyond the model's table of positions, a dropout is active, or the
            model was switched to another attention.
    """
    states: Tensor = _call(loaded, batch, find_decoder(loaded.causal), options).last_hidden_state
    return states[0]


def _call(loaded: LoadedModel, batch: Batch, module: Any, options: dict[str, Any]) -> Any:
    """Return the output of `module`, the model or its part without the output layer, for a packed row.

    Raises:
        TreepackError: as `hidden_states`.
    """
    # Another attention implementation would ignore subtree_end and give wrong gradients without an error.
    config = loaded.causal.config.get_text_config()
    current, expected = config._attn_implementation, IMPLEMENTATIONS[loaded.attention]
    if current != expected:
        raise TreepackError(
            f"{loaded.source}: its attention was switched to {current!r}, which ignores subtree_end; switch back with "
            f"model.set_attn_implementation({expected!r})"
        )
    check_dropout(loaded.model)
    if batch.schedule is None:
        batch = prepare_batch(loaded, batch)
    use_routes(loaded.causal, loaded.source, batch.routes)
    inside = isinstance(batch.schedule, Schedules) and takes_packed(loaded.causal)
    packed = batch.schedule.packed if inside else None
    kept = Kept() if packed is None and recomputes(loaded.causal) else None
    try:
        # [None]: transformers expects a batch dimension, [T] -> [1, T]
        return module(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            subtree_end=batch.subtree_end[None],
            schedule=batch.schedule,
            use_cache=False,
            **{"tree_pass": TreePass(kept, packed=packed), **options},
        )
    except IndexError as error:  # position_limit finds most tables beforehand; this is one that it did not recognise
        raise TreepackError(
            f"{loaded.source}: it cannot run {batch.name}, whose positions reach {int(batch.position_ids.max())} "
            f"({one_line(error)}); truncate the trajectories to the number of positions that the model has"
        ) from error


def run_with_head(
    loaded: LoadedModel, batch: Batch, compute: Callable[[Tensor, OutputLayer], Any], **options: Any
) -> Any:
    """Return compute(states [T, D], output layer) of a packed row; `options` are further arguments of the model.

    Raises:
        TreepackError: as `hidden_states`.
    """
    with head_replaced(loaded.causal, compute) as call:
        _call(loaded, batch, loaded.model, options)
    return call.result


def row_loss(loaded: LoadedModel, batch: Batch, *, chunk: int = CHUNK) -> Tensor:
    """Return the sum over the row's targets of loss_weight * nll, a float64 scalar; see `loss.weighted_nll`."""
    loss: Tensor = run_with_head(loaded, batch, lambda states, layer: layer.nll(states, batch.targets, chunk=chunk))
    return loss


def pass_loss(
    loaded: LoadedModel,
    batch: Batch,
    objective: Objective | None = None,
    factors: Tensor | None = None,
    *,
    denominator: float = 1.0,
    chunk: int = CHUNK,
) -> PassLoss:
    """Return the part of a step's loss that the rows of a batch have.

    Args:
        loaded: the model.
        batch: one row, or joined rows, on the model's device.
        objective: with `factors`, as in `row_objective`; without them the loss is that of `row_loss` / `denominator`.
        factors: of the trajectories of all rows, on the model's device.
        denominator: total weight of the step's rows.
        chunk: targets whose logits are in memory at a time.
    """
    if factors is not None:
        assert objective is not None
        return _term_loss(loaded, batch, factors, objective, chunk)
    edges = None if batch.edges is None else batch.edges.targets
    total, rows = run_with_head(
        loaded, batch, lambda states, layer: layer.nll_of_rows(states, batch.targets, edges, chunk=chunk)
    )
    return PassLoss(total / denominator, rows.detach() / denominator, {})


def row_logprobs(
    loaded: LoadedModel,
    batch: Batch,
    tokens: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    with_entropies: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [n] of the row's `tokens`, int64 [n]; see `loss.tree_logprobs`."""
    options: Any = {"temperature": temperature, "with_entropies": with_entropies, "chunk": chunk}

    def compute(states: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
        return layer.logprobs(states, tokens, batch.input_ids, batch.parent, **options)

    logprobs, entropies = run_with_head(loaded, batch, compute)
    return logprobs, entropies


def row_objective(
    loaded: LoadedModel,
    batch: Batch,
    factors: Tensor,
    objective: Objective,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the row's part of a step's loss, and of the sums for the step's means; see `objectives.objective_loss`.

    Args:
        loaded: the model.
        batch: the row, with its terms, on the model's device.
        factors: float64 [num_trajectories], from `denominators.step_factors`, on the model's device.
        objective: any but sft. dpo computes log-probabilities at the temperature 1, all others at those of the terms,
            and at `objective.temperature` where the terms lack one.
        chunk: tokens whose logits are in memory at a time.
    """
    loss = _term_loss(loaded, batch, factors, objective, chunk)
    return loss.total, loss.sums


def _term_loss(loaded: LoadedModel, batch: Batch, factors: Tensor, objective: Objective, chunk: int) -> PassLoss:
    terms = batch.terms
    assert terms is not None, "open the dataset with terms=True"
    part = TermObjective(
        objective=objective,
        terms=terms,
        factors=factors,
        targets=(terms.tokens, batch.input_ids, batch.parent),
        temperature=loss_temperature(terms, objective),
        chunk=chunk,
        edges=batch.edges,
    )
    loss: PassLoss = run_with_head(loaded, batch, partial(part.loss, loaded))
    return loss


def row_values(loaded: LoadedModel, batch: Batch, tokens: Tensor) -> Tensor:
    """Return the values [n] of the states after the row's `tokens`, int64 [n], float32 or float64.

    Raises:
        TreepackError: as `hidden_states`, and if the model has no value head.
    """
    head = require_value_head(loaded)
    values: Tensor = run_with_head(loaded, batch, lambda states, _: head(states, tokens))
    return values
