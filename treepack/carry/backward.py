"""Forward and backward of a packed row in pieces: the loss and the gradients of the row as a whole.

    backward_row    adds the gradients of a row's part of a step's loss to the parameters
    row_value       the loss alone, without gradients
    row_scores      log-probabilities and entropies of chosen tokens, without gradients
    row_values      the values of a critic after all tokens, without gradients

sft and the objectives of single tokens run in one phase: each piece has its own part of the loss. gspo and dpo are
about whole trajectories, so they run in two: first all log-probabilities (and values) without a graph, and the slope
of the objective by each of them; then each piece runs backward with the slopes of its own tokens. The gradient is the
same, by the chain rule; every token runs forward once more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from treepack.carry.offload import CarriedBytes, CarryMemory
from treepack.carry.row import CarriedRow, PieceRow, open_row
from treepack.carry.terms import SortedTerms, Targets
from treepack.data.batch import Batch
from treepack.data.transfers import sent
from treepack.errors import TreepackError
from treepack.model.forward import hidden_states, run_with_head
from treepack.model.head.output_head import OutputLayer
from treepack.model.head.token_loss import CHUNK
from treepack.model.loaded import LoadedModel
from treepack.model.objectives.losses import objective_loss
from treepack.model.objectives.objective import Objective
from treepack.model.objectives.term_objective import (
    Reads,
    Scores,
    TermObjective,
    loss_temperature,
    require_value_head,
    score,
)

# Losses whose value depends on all tokens of a trajectory, which may lie in several pieces.
TWO_PHASES = ("gspo", "dpo")


@dataclass(frozen=True)
class CarryOptions:
    """How a row runs in pieces.

    Attributes:
        limit: tokens of a piece.
        chunk: tokens whose logits are in memory at a time.
        memory: the budget of carried tensors, one object for all rows; None keeps all of them on the model's device.
        autocast: makes the context in which each pass runs forward. Autocast remembers weights that it has cast, also
            those of a pass without a graph, so each pass needs a context of its own.
    """

    limit: int
    chunk: int = CHUNK
    memory: CarryMemory | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        """Refuse invalid sizes.

        Raises:
            TreepackError: with the name of the field.
        """
        for name in ("limit", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise TreepackError(f"{name} is {value!r}; expected a number of tokens of at least 1")


@dataclass(frozen=True)
class RowResult:
    """The loss of a row whose gradients were added, and its counts.

    Attributes:
        loss: float64 scalar, the row's part of the step's loss.
        sums: the sums of `objectives.objective_loss`; empty for sft.
        tokens_forward: tokens that ran forward.
        tokens_backward: tokens that ran backward.
        carried_bytes: most bytes of carried keys, values, sums of gradients, and kept outputs of trunk.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    tokens_forward: int
    tokens_backward: int
    carried_bytes: CarriedBytes


def backward_row(
    loaded: LoadedModel,
    batch: Batch,
    options: CarryOptions,
    *,
    objective: Objective = Objective(),  # noqa: B008  # a frozen value
    factors: Tensor | None = None,
    denominator: float = 1.0,
) -> RowResult:
    """Add the gradients of a row's part of a step's loss to the parameters' gradients.

    Args:
        loaded: the model.
        batch: the row; with its terms for any objective but sft.
        options: the pieces.
        objective: the loss.
        factors: float64 [num_trajectories], from `denominators.step_factors`; None for sft.
        denominator: total weight of the step's rows, for sft.

    Raises:
        TreepackError: the model cannot run the row in pieces, see `refusal.check_carry` and `row.open_row`; the
            objective lacks its factors; or this is the inside of an autocast context.
    """
    _check_autocast(loaded.device.type)
    _check_factors(objective, factors)
    row = open_row(loaded, batch, options.limit, with_gradients=True, memory=options.memory)
    if factors is None:
        part: _Part = _WeightedLoss(row, options, denominator)
    elif objective.loss in TWO_PHASES:
        part = _Slopes(row, options, objective, factors.to(loaded.device))
    else:
        part = _TermLoss(row, options, objective, factors.to(loaded.device))
    total = torch.zeros((), dtype=torch.float64, device=loaded.device)
    sums: dict[str, Tensor] = {}
    for each in row.plan.passes:
        with row.running(each) as piece:
            if each.kind == "push":
                with torch.no_grad(), options.autocast():
                    loaded.compute(partial(hidden_states, loaded, piece.batch, **piece.options))
                continue
            with options.autocast():
                loss, numbers = loaded.compute(partial(part.of, piece))
            torch.autograd.backward(loss)
            total = total + loss.detach()
            sums = {name: number + sums.get(name, 0.0) for name, number in numbers.items()}
    known = part.result
    loss, sums = known if known is not None else (total, sums)
    forward = row.plan.tokens_forward + (0 if known is None else row.plan.without_backward().tokens_forward)
    return RowResult(loss, sums, forward, row.plan.tokens_backward, row.most_bytes)


def _check_autocast(device: str) -> None:
    # A push casts weights without a graph. A context around all passes would keep these casts, and a later pass that
    # took them would give the weights no gradient.
    if torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
        raise TreepackError(
            "backward_row runs inside torch.autocast, which would keep weights that have no gradient; call it outside "
            "and pass CarryOptions(autocast=...), a function that makes such a context"
        )


def _check_factors(objective: Objective, factors: Tensor | None) -> None:
    if factors is None and objective.loss != "sft":
        raise TreepackError(f"factors of the loss {objective.loss} are missing; pass those of step_factors")
    if factors is not None and objective.loss == "sft":
        raise TreepackError("factors of the loss sft have no use; pass none")


@torch.no_grad()
def row_value(
    loaded: LoadedModel,
    batch: Batch,
    options: CarryOptions,
    *,
    objective: Objective = Objective(),  # noqa: B008
    factors: Tensor | None = None,
    denominator: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a row's part of a step's loss and its sums, without gradients; arguments as in `backward_row`."""
    _check_factors(objective, factors)
    row = open_row(loaded, batch, options.limit, with_gradients=False, memory=options.memory)
    if factors is not None:
        assert row.batch.terms is not None, "open the dataset with terms=True"
        logprobs, entropies, values = _scores(row, options, _Wanted.of(row, objective))
        return objective_loss(logprobs, entropies, row.batch.terms, factors.to(loaded.device), objective, values=values)
    part, total = _WeightedLoss(row, options, denominator), torch.zeros((), dtype=torch.float64, device=loaded.device)
    for each in row.plan.passes:
        with row.running(each) as piece, options.autocast():
            total = total + loaded.compute(partial(part.of, piece))[0]
    return total, {}


@torch.no_grad()
def row_scores(
    loaded: LoadedModel,
    batch: Batch,
    tokens: Tensor,
    options: CarryOptions,
    *,
    temperature: Tensor | float = 1.0,
    with_entropies: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [n] of chosen tokens of a row, without gradients; each token runs once.

    Args:
        loaded: the model.
        batch: the row.
        tokens: int64 [n], tokens of the row that have a parent, in any order.
        options: the pieces.
        temperature: divides the logits; a number, or [n] on the model's device.
        with_entropies: False gives NaN for entropies, which saves time.

    Raises:
        TreepackError: the model cannot run the row in pieces, see `row.open_row`.
    """
    row = open_row(loaded, batch, options.limit, with_gradients=False, memory=options.memory)
    wanted = _Wanted(Targets.of(row, tokens), temperature, Reads(entropies=with_entropies))
    logprobs, entropies, _ = _scores(row, options, wanted)
    assert logprobs is not None
    return logprobs, torch.full_like(logprobs, torch.nan) if entropies is None else entropies


@torch.no_grad()
def values_in_pieces(loaded: LoadedModel, batch: Batch, options: CarryOptions) -> Tensor:
    """Return the values of the states after all tokens of a row [num_tokens], without gradients.

    Raises:
        TreepackError: as `row_scores`, and if the model has no value head.
    """
    head = require_value_head(loaded)
    row = open_row(loaded, batch, options.limit, with_gradients=False, memory=options.memory)
    parts: list[Tensor] = []
    for each in row.plan.passes:
        with row.running(each) as piece, options.autocast():
            tokens = torch.arange(piece.end - piece.begin, device=loaded.device)
            run = partial(run_with_head, loaded, piece.batch, lambda states, _: head(states, tokens), **piece.options)  # noqa: B023
            parts.append(loaded.compute(run))
    # By number -> by token
    return torch.cat(parts).index_select(0, torch.from_numpy(row.numbers).to(loaded.device))


@dataclass(frozen=True)
class _Wanted:
    """Numbers about tokens of a row: the tokens, their temperature (one, or [n] in the caller's order), and which."""

    targets: Targets
    temperature: Tensor | float
    reads: Reads

    @classmethod
    def of(cls, row: CarriedRow, objective: Objective) -> Self:
        """Return what an objective over terms reads of a row."""
        terms = row.batch.terms
        assert terms is not None, "open the dataset with terms=True"
        return cls(Targets.of(row, terms.tokens), loss_temperature(terms, objective), Reads.of(objective))


def _scores(row: CarriedRow, options: CarryOptions, wanted: _Wanted) -> Scores:
    parts = []
    for each in row.plan.passes:
        if each.kind == "pop":
            continue
        with row.running(each) as piece, options.autocast():
            parts.append(row.loaded.compute(partial(_piece_scores, piece, row.loaded, wanted, options)))
    # Sorted by parent -> the caller's order: order [2 0 1], values [a b c] -> [b c a]
    places = torch.from_numpy(wanted.targets.order).to(row.loaded.device)
    columns = [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]
    return Scores(*(each if each is None else torch.empty_like(each).index_copy_(0, places, each) for each in columns))


def _piece_scores(piece: PieceRow, loaded: LoadedModel, wanted: _Wanted, options: CarryOptions) -> Scores:
    """Return the numbers about the targets that a piece predicts, in the order of `wanted.targets`."""
    columns, temperature = _piece_targets(piece, wanted)

    def compute(states: Tensor, layer: OutputLayer) -> Scores:
        return score(loaded, wanted.reads, states, layer, columns, temperature=temperature, chunk=options.chunk)

    scores: Scores = run_with_head(loaded, piece.batch, compute, **piece.options)
    return scores


def _piece_targets(piece: PieceRow, wanted: _Wanted) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | float]:
    """Return the targets that a piece predicts, as `TermObjective` has them, and their temperature."""
    targets, temperature = wanted.targets, wanted.temperature
    span = targets.of_piece(piece)
    labels, sources = targets.labels[span], targets.sources[span] - piece.begin
    if isinstance(temperature, Tensor):
        places = sent(torch.from_numpy(targets.order[span]), temperature.device)
        temperature = sent(temperature.index_select(0, places), labels.device)
    return (torch.arange(len(labels)), labels, sources), temperature


class _Part:
    """The loss of a row, piece by piece."""

    # Loss and sums of the row, if they are known before its pieces run backward.
    result: tuple[Tensor, dict[str, Tensor]] | None = None

    def of(self, piece: PieceRow) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar that a piece runs backward, with a graph, and its part of the sums."""
        raise NotImplementedError


class _WeightedLoss(_Part):
    """sft: the weighted cross-entropy of the tokens that a piece predicts."""

    def __init__(self, row: CarriedRow, options: CarryOptions, denominator: float) -> None:
        self._loaded, self._options, self._denominator = row.loaded, options, denominator
        # On the CPU, like the parents: then a piece does not wait for the GPU.
        weights = row.batch.loss_weight[: row.batch.num_tokens].cpu()
        tokens = weights.nonzero().squeeze(-1)
        self._targets = Targets.of(row, tokens)
        self._weights = weights[tokens][torch.from_numpy(self._targets.order)]

    def of(self, piece: PieceRow) -> tuple[Tensor, dict[str, Tensor]]:
        span = self._targets.of_piece(piece)
        labels, sources = self._targets.labels[span], self._targets.sources[span] - piece.begin
        columns = labels, sources, self._weights[span]
        loss: Tensor = run_with_head(
            self._loaded,
            piece.batch,
            lambda states, layer: layer.nll(states, columns, chunk=self._options.chunk),
            **piece.options,
        )
        return loss / self._denominator, {}


class _TermLoss(_Part):
    """An objective of single tokens: the terms of the tokens that a piece predicts."""

    def __init__(self, row: CarriedRow, options: CarryOptions, objective: Objective, factors: Tensor) -> None:
        self._loaded, self._options, self._objective, self._factors = row.loaded, options, objective, factors
        self._wanted = _Wanted.of(row, objective)
        assert row.batch.terms is not None
        self._terms = SortedTerms.of(row.batch.terms, self._wanted.targets)

    def of(self, piece: PieceRow) -> tuple[Tensor, dict[str, Tensor]]:
        columns, temperature = _piece_targets(piece, self._wanted)
        part = TermObjective(
            objective=self._objective,
            terms=self._terms.of_piece(piece, self._wanted.targets.of_piece(piece)),
            factors=self._factors,
            targets=columns,
            temperature=temperature,
            chunk=self._options.chunk,
        )
        loss = run_with_head(self._loaded, piece.batch, partial(part.loss, self._loaded), **piece.options)
        return loss.total, loss.sums


class _Slopes(_Part):
    """An objective of whole trajectories: the numbers that it reads about the tokens of a piece, times their slopes."""

    def __init__(self, row: CarriedRow, options: CarryOptions, objective: Objective, factors: Tensor) -> None:
        self._loaded, self._options, self._wanted = row.loaded, options, _Wanted.of(row, objective)
        forward = open_row(row.loaded, row.batch, options.limit, with_gradients=False, memory=options.memory)
        with torch.no_grad():
            scores = _scores(forward, options, self._wanted)
        read = [each.requires_grad_() for each in scores if each is not None]
        terms = row.batch.terms
        assert terms is not None
        loss, sums = objective_loss(scores.logprobs, scores.entropies, terms, factors, objective, values=scores.values)
        slopes = torch.autograd.grad(loss, read, allow_unused=True, materialize_grads=True)
        self.result = loss.detach(), sums
        places = torch.from_numpy(self._wanted.targets.order).to(loss.device)
        self._slopes = [slope.index_select(0, places) for slope in slopes]

    def of(self, piece: PieceRow) -> tuple[Tensor, dict[str, Tensor]]:
        span = self._wanted.targets.of_piece(piece)
        scores = _piece_scores(piece, self._loaded, self._wanted, self._options)
        read = zip([each for each in scores if each is not None], self._slopes, strict=True)
        return torch.stack([(values.double() * slope[span]).sum() for values, slope in read]).sum(), {}
