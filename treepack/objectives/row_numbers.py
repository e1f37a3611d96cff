"""Requests for numbers of a row, and the results: values without code, shared by all ways to run a row.

    LossPart    the loss of an optimiser step, of which the row has a part      -> RowResult
    Reads       which numbers about tokens are computed                         -> TokenScores

A row runs as a whole (`model.forward.WholeRows`) or in pieces (`carry.backward.RowsInPieces`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from treepack.errors import TreepackError
from treepack.memory.host_pages import CarriedBytes
from treepack.objectives.objective import Objective


@dataclass(frozen=True)
class LossPart:
    """The part of a step's loss that a row, or joined rows, have.

    Attributes:
        objective: the loss. A loss of pairs computes log-probabilities at the temperature 1. All others use the
            temperatures of the terms, and `objective.temperature` for terms without one.
        factors: float64 [num_trajectories] of all rows, from `denominators.step_factors`; None without terms (sft).
        denominator: total weight of the step's rows, for a loss without terms.
    """

    objective: Objective = Objective()  # noqa: RUF009  # a frozen value
    factors: Tensor | None = None
    denominator: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an objective without its factors."""
        loss, has_terms = self.objective.loss, self.objective.has_terms
        if self.factors is None and has_terms:
            raise TreepackError(f"factors of the loss {loss} are missing; pass the factors of step_factors")
        if self.factors is not None and not has_terms:
            raise TreepackError(f"factors of the loss {loss} have no use; pass none")


class RowResult(NamedTuple):
    """The loss of one row or of joined rows, and the work that it took.

    A NamedTuple, so that a sharded model finds the tensors in it (`LoadedModel.compute`).

    Attributes:
        loss: float64 scalar, the part of the step's loss.
        rows: float64 [n], the part of each row, without a graph.
        sums: float64 scalars for the means of a step, see `losses.objective_loss`; empty for sft.
        tokens_forward: tokens that ran forward.
        tokens_backward: tokens that ran backward.
        carried_bytes: most bytes of carried keys, values, sums of gradients, and kept outputs of trunk.
    """

    loss: Tensor
    rows: Tensor
    sums: dict[str, Tensor]
    tokens_forward: int = 0
    tokens_backward: int = 0
    carried_bytes: CarriedBytes = CarriedBytes(0, 0)


@dataclass(frozen=True)
class ScoreRequest:
    """The numbers that are computed about each of some tokens; entropies only beside log-probabilities."""

    logprobs: bool = True
    entropies: bool = True
    values: bool = False  # of the state before the token, which is that after its parent
    divergence: float | None = None  # beta of the divergence from the laws of a teacher (`distillation`)
    top_k: int = 0  # likeliest words with their log-probabilities
    states: bool = False  # the hidden states that predict the tokens

    @classmethod
    def of(cls, objective: Objective) -> Self:
        """Return the numbers that an objective over terms reads."""
        return cls(objective.reads_logprobs, objective.is_policy, objective.has_values, objective.law_beta)


class TokenScores(NamedTuple):
    """The numbers of the model about n tokens, [n] each; None if they are not computed.

    `top_words` int64 and `top_logprobs` are [n, K], the likeliest word first; `states` are [n, D].
    """

    logprobs: Tensor | None
    entropies: Tensor | None
    values: Tensor | None
    divergences: Tensor | None = None
    top_words: Tensor | None = None
    top_logprobs: Tensor | None = None
    states: Tensor | None = None
