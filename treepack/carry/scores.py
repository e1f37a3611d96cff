"""Numbers about chosen tokens of a row in pieces, computed piece by piece.

row, RowRequest --row_scores--> TokenScores in the caller's order
one piece       --piece_scores--> the numbers about the tokens that it predicts
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from treepack.carry.row import CarriedRow, PieceRow
from treepack.carry.terms import PieceTargets
from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw
from treepack.data.transfers import sent
from treepack.model.forward import run_with_head
from treepack.model.head.logit_map import OutputLayer
from treepack.model.loaded import LoadedModel
from treepack.model.term_objective import loss_sets, loss_temperature, score
from treepack.objectives.objective import Objective
from treepack.objectives.row_numbers import ScoreRequest, TokenScores


@dataclass(frozen=True)
class RowRequest:
    """Tokens of a row, their temperature (one, or [n] in the caller's order) and kept sets, and what to compute."""

    targets: PieceTargets
    temperature: Tensor | float
    kept: RaggedTensor | None
    reads: ScoreRequest
    teacher: TeacherLaw | None = None  # of the tokens in the caller's order

    @classmethod
    def of(cls, row: CarriedRow, objective: Objective) -> Self:
        """Return the request of an objective over terms."""
        terms = row.batch.terms
        assert terms is not None, "open the dataset with terms=True"
        law = loss_temperature(terms, objective), loss_sets(terms, objective)
        return cls(PieceTargets.of(row, terms.tokens), *law, ScoreRequest.of(objective), terms.teacher)


def row_scores(
    row: CarriedRow, wanted: RowRequest, autocast: Callable[[], AbstractContextManager[Any]], chunk: int
) -> TokenScores:
    """Run the pieces of a row without gradients; return the numbers about the wanted tokens, in their order."""
    parts = []
    for each in row.plan.passes:
        if each.kind == "pop":
            continue
        with row.running(each) as piece, autocast():
            parts.append(row.loaded.compute(partial(piece_scores, piece, row.loaded, wanted, chunk)))
    # Sorted by parent -> the caller's order: order [2 0 1], values [a b c] -> [b c a]
    places = torch.from_numpy(wanted.targets.order).to(row.loaded.device)
    columns = [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]
    return TokenScores(
        *(each if each is None else torch.empty_like(each).index_copy_(0, places, each) for each in columns)
    )


def piece_scores(piece: PieceRow, loaded: LoadedModel, wanted: RowRequest, chunk: int) -> TokenScores:
    """Return the numbers about the targets that a piece predicts, in the order of `wanted.targets`."""
    columns, law = piece_targets(piece, wanted)
    places = torch.from_numpy(wanted.targets.order[wanted.targets.of_piece(piece)])
    teacher = None if wanted.teacher is None else wanted.teacher[places]

    def compute(states: Tensor, layer: OutputLayer) -> TokenScores:
        return score(loaded, wanted.reads, states, layer, columns, **law, chunk=chunk, teacher=teacher)

    return run_with_head(loaded, piece.batch, compute, **piece.options)


def piece_targets(piece: PieceRow, wanted: RowRequest) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return the targets that a piece predicts, as `TermObjective` has them, and their `temperature` and `kept`."""
    targets, temperature, kept = wanted.targets, wanted.temperature, wanted.kept
    span = targets.of_piece(piece)
    labels, sources = targets.labels[span], targets.sources[span] - piece.begin
    places = torch.from_numpy(targets.order[span])
    if isinstance(temperature, Tensor):
        temperature = sent(temperature.index_select(0, sent(places, temperature.device)), labels.device)
    if kept is not None:
        kept = kept[places].map(lambda each: sent(each, labels.device))
    return (torch.arange(len(labels)), labels, sources), {"temperature": temperature, "kept": kept}
