"""Objectives over terms from the states of a row, joined rows or a piece, through the output layer.

    states [T, D], terms --TermObjective.loss--> RowResult: the loss, that of each row, sums for the step's means
    states [T, D], tokens --score--> TokenScores: log-probabilities, entropies, values of the tokens

`forward` runs whole rows and `carry.backward` pieces of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treepack.data.batch import RowEdges, TermTensors
from treepack.data.joined import terms_of_row
from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw
from treepack.data.transfers import sent
from treepack.errors import TreepackError
from treepack.model.head.distribution_loss import top_words
from treepack.model.head.head_gradients import is_float16
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.term_prices import prices_of_terms
from treepack.model.head.token_loss import filled_temperature, priced_terms, tree_scores
from treepack.model.head.value_head import ValueHead
from treepack.model.loaded import LoadedModel
from treepack.objectives.losses import name_sums, objective_loss, weigh_terms
from treepack.objectives.objective import Objective
from treepack.objectives.policy_terms import TERM_MEANS
from treepack.objectives.row_numbers import RowResult, ScoreRequest, TokenScores
from treepack.objectives.value_loss import value_loss


def score(
    loaded: LoadedModel,
    reads: ScoreRequest,
    states: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    *,
    temperature: Tensor | float,
    kept: RaggedTensor | None,
    chunk: int,
    teacher: TeacherLaw | None = None,
) -> TokenScores:
    """Return the requested numbers about tokens, from the states [T, D] of a row or piece: `token_loss.tree_logprobs`.

    Raises:
        TreepackError: the model has no value head and values are read.
    """
    logprobs = entropies = values = divergences = words = top = before = None
    if reads.logprobs or reads.divergence is not None:
        logprobs, entropies, divergences = tree_scores(
            states,
            layer,
            targets,
            temperature=temperature,
            kept=kept,
            with_entropies=reads.entropies,
            teacher=_teacher(teacher, reads.divergence),
            chunk=chunk,
        )
        entropies = entropies if reads.entropies else None  # they would be NaN
        divergences = None if reads.divergence is None else divergences
    if reads.values:
        values = values_before(loaded, states, layer, targets)
    if reads.states or reads.top_k:
        words, top, before = _words_and_states(reads, states, layer, targets, temperature, chunk)
    return TokenScores(logprobs, entropies, values, divergences, words, top, before)


def _teacher(law: TeacherLaw | None, beta: float | None) -> tuple[TeacherLaw, float] | None:
    if beta is None:
        return None
    assert law is not None, "the rows have the laws of a teacher, or a teacher has computed them"
    return law, beta


def _words_and_states(
    reads: ScoreRequest,
    states: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    temperature: Tensor | float,
    chunk: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the likeliest words at tokens, their log-probabilities, and the states before tokens; None if not read.

    If ranks share the row, they have the numbers of all ranks.
    """
    share, count, words, top, before = layer.share, len(targets[0]), None, None, None
    if share is not None:
        places, targets = share.own_targets(targets)
        if isinstance(temperature, Tensor):
            temperature = temperature.index_select(0, sent(places, temperature.device))
    if reads.states:
        before = states.index_select(0, sent(targets[2].index_select(0, targets[0]), states.device))
    if reads.top_k:
        words, top = top_words(states, layer, targets, reads.top_k, temperature=temperature, chunk=chunk)
    if share is not None:
        words, top, before = (
            None if each is None else share.whole(each, places, count) for each in (words, top, before)
        )
    return words, top, before


def values_before(
    loaded: LoadedModel, states: Tensor, layer: OutputLayer, targets: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return the values [n] before tokens, from the states [T, D] of a row or piece; see `token_loss.tree_logprobs`.

    Raises:
        TreepackError: the model has no value head.
    """
    head, share, count = require_value_head(loaded), layer.share, len(targets[0])
    if share is not None:
        places, targets = share.own_targets(targets)
    tokens, _, parent = targets
    values: Tensor = head(states, sent(parent.index_select(0, tokens), states.device))
    return values if share is None else share.whole(values, places, count)


@dataclass(frozen=True)
class TermObjective:
    """An objective over the terms of a row, joined rows or a piece.

    Attributes:
        objective: any but sft.
        terms: the terms, about the tokens in `targets`.
        factors: float64 [num_trajectories], from `denominators.step_factors`.
        targets: int64 tokens [n], input_ids [T] and parent [T], see `token_loss.tree_logprobs`.
        temperature: one for all tokens, or one for each.
        chunk: tokens whose logits are in memory at a time.
        kept: token ids of each token's distribution, see `token_loss.tree_logprobs`.
        edges: of joined rows.
    """

    objective: Objective
    terms: TermTensors
    factors: Tensor
    targets: tuple[Tensor, Tensor, Tensor]
    temperature: Tensor | float
    chunk: int
    kept: RaggedTensor | None = None
    edges: RowEdges | None = None

    def loss(self, loaded: LoadedModel, states: Tensor, layer: OutputLayer) -> RowResult:
        """Return loss and sums, see `losses.objective_loss`, from the states [T, D] of the rows or the piece.

        An objective with `is_tokenwise` computes its gradients through the output layer here, except in float16. So
        only one backward pass may go through the loss.

        Raises:
            TreepackError: the model has no value head and values are read, or a column is missing.
        """
        is_priced = self.objective.is_tokenwise and len(self.targets[0]) > 0 and torch.is_grad_enabled()
        # A loss scale acts after the loss: too late for the slopes here, of 1 / tokens of a step, if they are float16.
        if not is_priced or is_float16(states):
            reads = ScoreRequest.of(self.objective)
            law: dict[str, Any] = {"temperature": self.temperature, "kept": self.kept, "teacher": self.terms.teacher}
            scores = score(loaded, reads, states, layer, self.targets, **law, chunk=self.chunk)
            return self._by_row(self.terms, scores, partial(loss_of_scores, objective=self.objective))
        terms = weigh_terms(self.terms, self.objective)
        edges = None if self.edges is None else self.edges.terms
        total, numbers = priced_terms(
            states,
            layer,
            self.targets,
            lambda order: prices_of_terms(
                terms,
                self.factors,
                self.objective,
                order,
                chunk=self.chunk,
                edges=edges,
                num_tokens=None if layer.share is None else len(self.targets[0]),
            ),
            temperature=self.temperature,
            kept=self.kept,
            teacher=_teacher(terms.teacher, self.objective.law_beta),
            chunk=self.chunk,
        )
        of_terms, rows = numbers[: len(TERM_MEANS)], numbers[len(TERM_MEANS) :]
        loss = RowResult(total, rows.detach(), name_sums(terms, of_terms, self.objective))
        if not self.objective.has_values:
            return loss
        values = values_before(loaded, states, layer, self.targets)
        more = self._by_row(terms, TokenScores(None, None, values), self._value_loss)
        coefficient = self.objective.value_coef
        return RowResult(total + coefficient * more.loss, rows + coefficient * more.rows, {**loss.sums, **more.sums})

    def _by_row(
        self, terms: TermTensors, scores: TokenScores, compute: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    ) -> RowResult:
        """Return the sums over the rows of compute(terms of a row, its scores, its factors)."""
        if self.edges is None:
            total, sums = compute(terms, scores, self.factors)
            return RowResult(total, total.detach()[None], sums)
        losses, sums = [], {}
        for i in range(len(self.edges.row_ids)):
            scored, owners = (slice(each[i], each[i + 1]) for each in (self.edges.scored, self.edges.trajectories))
            own = TokenScores(*(None if each is None else each[scored] for each in scores))
            loss, part = compute(terms_of_row(terms, self.edges, i), own, self.factors[owners])
            losses.append(loss)
            sums = {name: value + sums[name] if sums else value for name, value in part.items()}
        rows = torch.stack(losses)
        return RowResult(rows.sum(), rows.detach(), sums)

    def _value_loss(self, terms: TermTensors, scores: TokenScores, factors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert scores.values is not None
        return value_loss(scores.values, terms, factors, clip=self.objective.value_clip)


def loss_of_scores(
    terms: TermTensors, scores: TokenScores, factors: Tensor, objective: Objective
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `objective_loss` of the numbers about the tokens of the terms."""
    logprobs, entropies, values, divergences, *_ = scores
    return objective_loss(logprobs, entropies, terms, factors, objective, values=values, divergences=divergences)


def loss_temperature(terms: TermTensors, objective: Objective) -> Tensor | float:
    """Return the temperature of each of `terms.tokens`, or one for all: 1 for a loss that is not about the sampler."""
    return filled_temperature(terms.temperature, objective.temperature) if objective.is_policy else 1.0


def loss_sets(terms: TermTensors, objective: Objective) -> RaggedTensor | None:
    """Return the kept sets of `terms.tokens`; None for a loss that is not about the sampler."""
    return terms.kept_ids if objective.is_policy else None


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
