"""Forward passes of packed rows: from a batch to hidden states, log-probabilities or a loss.

    Batch --prepare_batch--> Batch with the attention's schedule, on the model's device
          --hidden_states--> [T, D] --row_loss-------> scalar: sum of loss_weight * nll
                                    --row_logprobs---> log-probabilities and entropies of chosen tokens
                                    --row_values-----> values of the states after chosen tokens, of a critic
                                    --row_objective--> scalar: the row's part of an objective over terms

The logits of a row never exist as a whole: `model.head` applies the output layer to the hidden states in chunks.
`model.collation` has the counterparts for models that another trainer has wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from treepack.attention import IMPLEMENTATIONS, Kept, Schedules, TreePass
from treepack.data.batch import Batch, TermTensors
from treepack.errors import TreepackError
from treepack.model.dropout import check_dropout
from treepack.model.first_batch import check_positions
from treepack.model.foreign_errors import one_line
from treepack.model.head import OutputLayer, head_replaced
from treepack.model.head_gradients import is_float16
from treepack.model.layers import find_decoder, recomputes
from treepack.model.loaded import LoadedModel
from treepack.model.loss import CHUNK, filled_temperature
from treepack.model.objective import Objective
from treepack.model.objectives import name_sums, objective_loss, weigh_terms
from treepack.model.replay import check_routes, use_routes
from treepack.model.term_prices import prices_of_terms
from treepack.model.text_half import check_text
from treepack.model.transfers import sent
from treepack.model.value_head import ValueHead
from treepack.model.value_loss import value_loss


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
    for kind in set(loaded.kinds):
        schedules.of(loaded.attention, kind.reach, varlen=loaded.varlen and kind.is_plain)
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
    try:
        # [None]: transformers expects a batch dimension, [T] -> [1, T]
        return module(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            subtree_end=batch.subtree_end[None],
            schedule=batch.schedule,
            use_cache=False,
            **{"tree_pass": TreePass(Kept() if recomputes(loaded.causal) else None), **options},
        )
    except IndexError as error:  # position_limit finds most tables beforehand; this is one that it did not recognise
        raise TreepackError(
            f"{loaded.source}: it cannot run row {batch.row_id}, whose positions reach {int(batch.position_ids.max())} "
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
    terms = batch.terms
    assert terms is not None, "open the dataset with terms=True"
    part = TermObjective(
        objective=objective,
        terms=terms,
        factors=factors,
        targets=(terms.tokens, batch.input_ids, batch.parent),
        temperature=loss_temperature(terms, objective),
        chunk=chunk,
    )
    loss, sums = run_with_head(loaded, batch, partial(part.loss, loaded))
    return loss, sums


def row_values(loaded: LoadedModel, batch: Batch, tokens: Tensor) -> Tensor:
    """Return the values [n] of the states after the row's `tokens`, int64 [n], float32 or float64.

    Raises:
        TreepackError: as `hidden_states`, and if the model has no value head.
    """
    head = require_value_head(loaded)
    values: Tensor = run_with_head(loaded, batch, lambda states, _: head(states, tokens))
    return values


@dataclass(frozen=True)
class Reads:
    """The numbers that are computed about each of some tokens; entropies only beside log-probabilities."""

    logprobs: bool = True
    entropies: bool = True
    values: bool = False

    @classmethod
    def of(cls, objective: Objective) -> Self:
        """Return the numbers that an objective over terms reads."""
        return cls(objective.loss != "value", objective.is_policy, objective.has_values)


class Scores(NamedTuple):
    """The numbers of the model about n tokens, [n] each; None if they are not computed."""

    logprobs: Tensor | None
    entropies: Tensor | None
    values: Tensor | None


def score(
    loaded: LoadedModel,
    reads: Reads,
    states: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    *,
    temperature: Tensor | float,
    chunk: int,
) -> Scores:
    """Return the numbers that an objective reads, from the states [T, D] of a row or piece.

    Args:
        loaded: the model, with a value head if values are read.
        reads: the numbers to compute.
        states: what the output layer gets.
        layer: the output layer.
        targets: int64 tokens [n], input_ids [T] and parent [T], see `loss.tree_logprobs`.
        temperature: one for all tokens, or one for each.
        chunk: tokens whose logits are in memory at a time.

    Raises:
        TreepackError: the model has no value head and values are read.
    """
    tokens, input_ids, parent = targets
    logprobs = entropies = values = None
    if reads.logprobs:
        options: Any = {"temperature": temperature, "with_entropies": reads.entropies, "chunk": chunk}
        logprobs, entropies = layer.logprobs(states, tokens, input_ids, parent, **options)
        entropies = entropies if reads.entropies else None  # they would be NaN
    if reads.values:
        # The value before a token is that of the state after its parent.
        values = require_value_head(loaded)(states, sent(parent.index_select(0, tokens), states.device))
    return Scores(logprobs, entropies, values)


@dataclass(frozen=True)
class TermObjective:
    """An objective over the terms of a row or piece.

    Attributes:
        objective: any but sft.
        terms: the terms, about the tokens in `targets`.
        factors: float64 [num_trajectories], from `denominators.step_factors`.
        targets: int64 tokens [n], input_ids [T] and parent [T], see `loss.tree_logprobs`.
        temperature: one for all tokens, or one for each.
        chunk: tokens whose logits are in memory at a time.
    """

    objective: Objective
    terms: TermTensors
    factors: Tensor
    targets: tuple[Tensor, Tensor, Tensor]
    temperature: Tensor | float
    chunk: int

    def loss(self, loaded: LoadedModel, states: Tensor, layer: OutputLayer) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and sums, see `objectives.objective_loss`, from the states [T, D] of the row or piece.

        An objective with `is_tokenwise` computes its gradients through the output layer here, except in float16. So
        only one backward pass may go through the loss.

        Raises:
            TreepackError: the model has no value head and values are read, or a column is missing.
        """
        is_priced = self.objective.is_tokenwise and len(self.targets[0]) > 0 and torch.is_grad_enabled()
        # A loss scale acts after the loss: too late for the slopes here, of 1 / tokens of a step, if they are float16.
        if not is_priced or is_float16(states):
            options: dict[str, Any] = {"temperature": self.temperature, "chunk": self.chunk}
            scores = score(loaded, Reads.of(self.objective), states, layer, self.targets, **options)
            logprobs, entropies, values = scores
            return objective_loss(logprobs, entropies, self.terms, self.factors, self.objective, values=values)
        terms = weigh_terms(self.terms, self.objective)
        loss, numbers = layer.priced(
            states,
            self.targets,
            lambda order: prices_of_terms(terms, self.factors, self.objective, order, chunk=self.chunk),
            temperature=self.temperature,
            chunk=self.chunk,
        )
        sums = name_sums(terms, numbers, self.objective)
        if not self.objective.has_values:
            return loss, sums
        tokens, _, parent = self.targets
        values = require_value_head(loaded)(states, sent(parent.index_select(0, tokens), states.device))
        value_part, more = value_loss(values, terms, self.factors, clip=self.objective.value_clip)
        return loss + self.objective.value_coef * value_part, {**sums, **more}


def loss_temperature(terms: TermTensors, objective: Objective) -> Tensor | float:
    """Return the temperature of each of `terms.tokens`, or one for all: 1 for a loss that is not about the sampler."""
    return filled_temperature(terms.temperature, objective.temperature) if objective.is_policy else 1.0


def require_value_head(loaded: LoadedModel) -> ValueHead:
    """Return the value head of a model.

    Raises:
        TreepackError: it has none.
    """
    head = loaded.value_head
    if head is None:
        raise TreepackError(
            f"{loaded.source}: has no value head; load it with load_model(..., value_head=True), or train one with "
            "`treepack train --loss value`"
        )
    return head
