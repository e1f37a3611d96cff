"""Run packed rows in pieces: losses, gradients and scores equal the results of whole rows.

    RowsInPieces    the second strategy of `model.forward.RowRunner`; only `backward` computes gradients
    runner_of       the strategy for a row: in pieces if it is longer than a piece, else as a whole
    backward_row    a short name for `RowsInPieces.backward` in other trainers

sft and the objectives of single tokens run in one phase: each piece has its own part of the loss. Others, such as gspo
and dpo, are about whole trajectories, so they run in two: first all log-probabilities (and values) without a graph, and
the slope of the objective by each of them; then each piece runs backward with the slopes of its tokens. The
gradient is the same, by the chain rule; every token runs forward once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from treepack.carry.offload import CarryMemory
from treepack.carry.row import CarriedRow, PieceRow, open_row
from treepack.carry.scores import RowRequest, piece_scores, piece_targets, row_scores
from treepack.carry.terms import PieceTargets, SortedTerms
from treepack.data.batch import Batch
from treepack.data.ragged_tensor import RaggedTensor
from treepack.errors import TreepackError
from treepack.model.forward import RowRunner, WholeRows, hidden_states, run_with_head
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.token_loss import CHUNK, weighted_nll
from treepack.model.loaded import LoadedModel
from treepack.model.term_objective import (
    TermObjective,
    loss_of_scores,
    require_value_head,
)
from treepack.objectives.objective import Objective
from treepack.objectives.row_numbers import LossPart, RowResult, ScoreRequest, TokenScores
from treepack.option_fields import parse_count

# Returns the scalar of a piece that runs backward, with a graph, and its part of the sums.
_PieceLoss: TypeAlias = Callable[[PieceRow], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class CarryOptions:
    """Options of rows in pieces."""

    limit: int  # tokens of a piece
    chunk: int = CHUNK  # tokens whose logits are in memory at a time
    memory: CarryMemory | None = None  # one budget for all rows; None keeps carried tensors on the model's device
    # Makes the context in which each pass runs forward. Autocast remembers weights that it has cast, even in a pass
    # without a graph, so each pass needs a new context.
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        """Refuse invalid sizes."""
        for name in ("limit", "chunk"):
            value = getattr(self, name)
            number = parse_count(value) if isinstance(value, str) else value
            if not isinstance(number, int) or number < 1:
                raise TreepackError(f"{name} is {value!r}; expected a number of tokens of at least 1")
            object.__setattr__(self, name, number)


@dataclass(frozen=True)
class RowsInPieces:
    """Each row in pieces of at most `options.limit` tokens; a `RowRunner`.

    Attributes:
        loaded: the model.
        options: the pieces.
    """

    loaded: LoadedModel
    options: CarryOptions

    @torch.no_grad()
    def loss(self, batch: Batch, part: LossPart = LossPart()) -> RowResult:  # noqa: B008  # a frozen value
        """Return the part of a step's loss, without gradients.

        Raises:
            TreepackError: the model cannot run the row in pieces, see `refusal.check_carry` and `row.open_row`.
        """
        row = self._open(batch, with_gradients=False)
        sums: dict[str, Tensor] = {}
        if part.factors is not None:
            loss, sums = _objective_of(row, part, self._scores(row, RowRequest.of(row, part.objective)))
        else:
            piece_loss = _weighted_loss(row, self.options, part.denominator)
            loss = torch.zeros((), dtype=torch.float64, device=self.loaded.device)
            for each in row.plan.passes:
                with row.running(each) as piece, self.options.autocast():
                    loss = loss + self.loaded.compute(partial(piece_loss, piece))[0]
        return RowResult(loss, loss[None], sums, row.plan.tokens_forward, carried_bytes=row.most_bytes)

    def backward(self, batch: Batch, part: LossPart = LossPart()) -> RowResult:  # noqa: B008
        """Add the gradients of the part of a step's loss to the parameters' gradients; return it without a graph.

        Raises:
            TreepackError: as `loss`, or this is the inside of an autocast context.
        """
        loaded, options = self.loaded, self.options
        _check_autocast(loaded.device.type)
        row = self._open(batch, with_gradients=True)
        forward, known = row.plan.tokens_forward, None
        if part.factors is None:
            piece_loss = _weighted_loss(row, options, part.denominator)
        elif part.objective.reads_trajectories:
            known, piece_loss = _two_phases(row, self._open(row.batch, with_gradients=False), options, part)
            forward += row.plan.without_backward().tokens_forward
        else:
            piece_loss = _term_loss(row, options, part.objective, part.factors.to(loaded.device))
        own = self._run_backward(row, piece_loss)
        total, sums = known or own
        return RowResult(total, total[None], sums, forward, row.plan.tokens_backward, row.most_bytes)

    def backward_scores(
        self,
        batch: Batch,
        tokens: Tensor,
        slopes: Sequence[Tensor],
        reads: ScoreRequest = ScoreRequest(),  # noqa: B008
        *,
        temperature: Tensor | float = 1.0,
        kept: RaggedTensor | None = None,
    ) -> None:
        """Add the gradients of chosen tokens' numbers times their slopes to the parameters' gradients.

        The other arguments are as in `scores`; `slopes` has [n] for each of the numbers that are read. Inside an
        autocast context, `options.autocast` must make contexts without a cache.

        Raises:
            TreepackError: as `backward`.
        """
        row = self._open(batch, with_gradients=True)
        wanted = RowRequest(PieceTargets.of(row, tokens), temperature, kept, reads)
        self._run_backward(row, _sloped_loss(row, self.options, wanted, slopes))

    def _run_backward(self, row: CarriedRow, piece_loss: _PieceLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Run all pieces of a row forward and backward; return the sum of their losses, and their sums."""
        loaded, options = self.loaded, self.options
        total = torch.zeros((), dtype=torch.float64, device=loaded.device)
        sums: dict[str, Tensor] = {}
        for each in row.plan.passes:
            with row.running(each) as piece:
                if each.kind == "push":
                    push = partial(run_with_head, loaded, piece.batch, lambda states, _: states.new_zeros(()))
                    with torch.no_grad(), options.autocast():
                        loaded.compute(partial(push, **piece.options))
                    torch.clear_autocast_cache()  # of the wrappers of a trainer; these weights have no graph
                    continue
                with torch.enable_grad(), options.autocast():
                    loss, numbers = loaded.compute(partial(piece_loss, piece))
                torch.autograd.backward(loss)
                total = total + loss.detach()
                sums = {name: number + sums.get(name, 0.0) for name, number in numbers.items()}
        return total, sums

    @torch.no_grad()
    def scores(
        self,
        batch: Batch,
        tokens: Tensor,
        reads: ScoreRequest = ScoreRequest(),  # noqa: B008
        *,
        temperature: Tensor | float = 1.0,
        kept: RaggedTensor | None = None,
    ) -> TokenScores:
        """Return numbers about chosen tokens of a row, without gradients; each token of the row runs once.

        `tokens`, int64 [n] in any order, have a parent; `temperature` is a number, or [n] on the model's device, like
        the n lists of `kept`.

        Raises:
            TreepackError: as `loss`, and if the model has no value head and values are read.
        """
        row = self._open(batch, with_gradients=False)
        return self._scores(row, RowRequest(PieceTargets.of(row, tokens), temperature, kept, reads))

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Return the values of the states after all tokens of a row [num_tokens], without gradients.

        Raises:
            TreepackError: as `loss`, and if the model has no value head.
        """
        require_value_head(self.loaded)
        row = self._open(batch, with_gradients=False)
        wanted = RowRequest(
            PieceTargets.of_states(row), 1.0, None, ScoreRequest(logprobs=False, entropies=False, values=True)
        )
        values = self._scores(row, wanted).values
        assert values is not None
        return values

    @torch.no_grad()
    def forward(self, batch: Batch) -> None:
        """Run the layers over each token once, without gradients, for hooks that count something.

        Raises:
            TreepackError: as `loss`.
        """
        row = self._open(batch, with_gradients=False)
        for each in row.plan.passes:
            with row.running(each) as piece, self.options.autocast():
                self.loaded.compute(partial(hidden_states, self.loaded, piece.batch, **piece.options))

    def _scores(self, row: CarriedRow, wanted: RowRequest) -> TokenScores:
        return row_scores(row, wanted, self.options.autocast, self.options.chunk)

    def _open(self, batch: Batch, *, with_gradients: bool) -> CarriedRow:
        options = self.options
        return open_row(self.loaded, batch, options.limit, with_gradients=with_gradients, memory=options.memory)


def runner_of(
    loaded: LoadedModel,
    batch: Batch,
    limit: int | None,
    *,
    chunk: int = CHUNK,
    memory: CarryMemory | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> RowRunner:
    """Return the runner of a row: in pieces if it has more than `limit` tokens, else as a whole.

    `limit` is None if every row runs as a whole. The other arguments are as in `CarryOptions`.
    """
    if limit is None or batch.num_tokens <= limit:
        return WholeRows(loaded, chunk, autocast)
    return RowsInPieces(loaded, CarryOptions(limit, chunk=chunk, memory=memory, autocast=autocast))


def backward_row(
    loaded: LoadedModel,
    batch: Batch,
    options: CarryOptions,
    *,
    objective: Objective = Objective(),  # noqa: B008
    factors: Tensor | None = None,
    denominator: float = 1.0,
) -> RowResult:
    """Add the gradients of a row's part of a step's loss to the parameters' gradients, and return the loss.

    `batch` is the row, with its terms for any objective but sft. For the last three arguments see `LossPart`.

    Raises:
        TreepackError: the objective lacks its factors, or as `RowsInPieces.backward`.
    """
    return RowsInPieces(loaded, options).backward(batch, LossPart(objective, factors, denominator))


def _check_autocast(device: str) -> None:
    # A push casts weights without a graph. A context around all passes would keep these casts, and a later pass that
    # took them would give the weights no gradient.
    if torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled():
        raise TreepackError(
            "backward_row runs inside torch.autocast, which would keep weights that have no gradient; call it outside "
            "and pass CarryOptions(autocast=...), a function that makes such a context"
        )


def _weighted_loss(row: CarriedRow, options: CarryOptions, denominator: float) -> _PieceLoss:
    """Return the loss of sft: the weighted cross-entropy of the tokens that a piece predicts."""
    # On the CPU, like the parents: then a piece does not wait for the GPU.
    of_tokens = row.batch.loss_weight[: row.batch.num_tokens].cpu()
    tokens = of_tokens.nonzero().squeeze(-1)
    targets = PieceTargets.of(row, tokens)
    weights = of_tokens[tokens][torch.from_numpy(targets.order)]

    def loss(piece: PieceRow) -> tuple[Tensor, dict[str, Tensor]]:
        span = targets.of_piece(piece)
        columns = targets.labels[span], targets.sources[span] - piece.begin, weights[span]

        def compute(states: Tensor, layer: OutputLayer) -> Tensor:
            return weighted_nll(states, layer, columns, chunk=options.chunk)

        return run_with_head(row.loaded, piece.batch, compute, **piece.options) / denominator, {}

    return loss


def _term_loss(row: CarriedRow, options: CarryOptions, objective: Objective, factors: Tensor) -> _PieceLoss:
    """Return the loss of an objective of single tokens: the terms of the tokens that a piece predicts."""
    wanted = RowRequest.of(row, objective)
    assert row.batch.terms is not None
    terms = SortedTerms.of(row.batch.terms, wanted.targets)

    def loss(piece: PieceRow) -> tuple[Tensor, dict[str, Tensor]]:
        columns, law = piece_targets(piece, wanted)
        part = TermObjective(
            objective=objective,
            terms=terms.of_piece(piece, wanted.targets.of_piece(piece)),
            factors=factors,
            targets=columns,
            **law,
            chunk=options.chunk,
        )
        result = run_with_head(row.loaded, piece.batch, partial(part.loss, row.loaded), **piece.options)
        return result.loss, result.sums

    return loss


def _two_phases(
    row: CarriedRow, forward: CarriedRow, options: CarryOptions, part: LossPart
) -> tuple[tuple[Tensor, dict[str, Tensor]], _PieceLoss]:
    """Return the loss and the sums of an objective of whole trajectories, and the loss of a piece.

    That is the numbers that the objective reads about the tokens of the piece, times their slopes. `forward` is the
    same row without gradients.
    """
    wanted = RowRequest.of(row, part.objective)
    with torch.no_grad():
        scores = row_scores(forward, wanted, options.autocast, options.chunk)
    read = [each.requires_grad_() for each in scores if each is not None]
    total, sums = _objective_of(row, part, scores)
    of_tokens = torch.autograd.grad(total, read, allow_unused=True, materialize_grads=True)
    return (total.detach(), sums), _sloped_loss(row, options, wanted, of_tokens)


def _sloped_loss(row: CarriedRow, options: CarryOptions, wanted: RowRequest, slopes: Sequence[Tensor]) -> _PieceLoss:
    """Return the loss of a piece: the numbers about its tokens times their slopes, in the caller's order."""
    places = torch.from_numpy(wanted.targets.order).to(row.loaded.device)
    in_order = [slope.index_select(0, places) for slope in slopes]

    def loss(piece: PieceRow) -> tuple[Tensor, dict[str, Tensor]]:
        span = wanted.targets.of_piece(piece)
        own = piece_scores(piece, row.loaded, wanted, options.chunk)
        pairs = zip([each for each in own if each is not None], in_order, strict=True)
        return torch.stack([(values.double() * slope[span]).sum() for values, slope in pairs]).sum(), {}

    return loss


def _objective_of(row: CarriedRow, part: LossPart, scores: TokenScores) -> tuple[Tensor, dict[str, Tensor]]:
    terms = row.batch.terms
    assert terms is not None
    assert part.factors is not None
    factors = part.factors.to(row.loaded.device)
    return loss_of_scores(terms, scores, factors, part.objective)
