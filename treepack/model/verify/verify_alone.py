"""Trajectories of a row run one by one, by the plain model of transformers: the slow side of a verification.

    Batch, trajectory --follow parents--> token ids --PlainModel--> logits, states --> loss of the trajectory

The output layer is applied to a chunk of positions at a time; a value head is applied to the states that the output
layer gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from treepack.data.batch import Batch, TermTensors
from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw
from treepack.model.experts.replay import use_routes
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.output_head import head_replaced
from treepack.model.head.value_head import value_head_of
from treepack.objectives.distillation import log_rest
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import Objective
from treepack.objectives.row_numbers import ScoreRequest, TokenScores
from treepack.trie.nodes import path_to


@dataclass(frozen=True)
class PlainModel:
    """The model with the attention of transformers; `chunk` positions have logits in memory at a time."""

    model: Any
    causal: Any
    chunk: int

    def replay(self, batch: Batch, path: Tensor) -> Tensor:
        """Return the tokens of a row at `path`, int64 [L], and replay their recorded routes from now on."""
        use_routes(self.causal, type(self.causal).__name__, None if batch.routes is None else batch.routes[path])
        return batch.input_ids[path]

    def reduce(self, tokens: Tensor, positions: Tensor, function: Callable[..., Any], *columns: Tensor) -> list[Any]:
        """Return `function(logits, *columns)` of each chunk of `positions`.

        Args:
            tokens: int64 [L], a trajectory.
            positions: int64 [n], whose logits [n, V] the function gets.
            function: reduces logits and the parts of the columns that belong to their positions.
            columns: [n, ...] each.
        """

        def compute(states: Tensor, layer: OutputLayer) -> list[Any]:
            def part(states: Tensor, *parts: Tensor) -> Any:
                return function(layer.logits(states), *parts)

            # The logits of a chunk are computed again in the backward pass.
            chunks = zip(*(torch.split(column, self.chunk) for column in (states[positions], *columns)), strict=True)
            return [checkpoint(part, *each, use_reentrant=False) for each in chunks]

        with head_replaced(self.causal, compute) as call:
            self.model(input_ids=tokens[None], use_cache=False)
        results: list[Any] = call.result
        return results

    def values(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the values [n] of the states after the tokens at `positions`, int64 [n], of a trajectory alone."""
        head = value_head_of(self.causal)
        assert head is not None, "checked by the packed side"
        with head_replaced(self.causal, lambda states, _: states) as call:
            self.model(input_ids=tokens[None], use_cache=False)
        # w . h + b written out: the packed side has another product
        chosen: Tensor = call.result[positions].to(head.weight.dtype)
        return (chosen * head.weight[0]).sum(-1) + head.bias[0]


def losses_alone(plain: PlainModel, batch: Batch, factors: Tensor | None, objective: Objective) -> Iterator[Tensor]:
    """Yield the loss of each trajectory of the row, from the logits of the plain model."""
    if factors is not None:
        yield from _objective_alone(plain, batch, factors, objective)
        return
    # scale is the number of trajectories through a token, and 0 for padding, whose weight is 0 too.
    share = batch.loss_weight / batch.scale.clamp(min=1)
    for i in range(len(batch.trajectory_ids)):
        path = _path(batch, i)
        tokens, weights = plain.replay(batch, path), share[path]
        if len(tokens) == 1:  # predicts nothing, and nothing predicts it
            continue
        # Every position except the last, which predicts nothing: logits[i] predicts tokens[i + 1].
        positions = torch.arange(len(tokens) - 1, device=path.device)
        yield torch.stack(plain.reduce(tokens, positions, _weighted_nll, tokens[1:], weights[1:])).sum()


def _weighted_nll(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (cross_entropy(logits, labels, reduction="none").double() * weights).sum()


def _objective_alone(plain: PlainModel, batch: Batch, factors: Tensor, objective: Objective) -> Iterator[Tensor]:
    """Yield one scalar per trajectory, with its gradient; the first has the loss of the row as its value, the others 0.

    The objective needs all trajectories at once, but memory has room for the graph of one. So the gradient of the
    objective by every log-probability and entropy comes first, from runs without a graph. Then each trajectory runs
    again, and its scalar passes its part of this gradient back to the parameters.
    """
    terms = batch.terms
    assert terms is not None
    num, each = len(batch.trajectory_ids), torch.arange(len(terms.index), device=factors.device)
    reads, law = ScoreRequest.of(objective), _SampledLaw.of(terms, objective)
    with torch.no_grad():
        parts = [_scores_alone(plain, batch, reads, law, i) for i in range(num)]
    # Numbers of [N] terms each: one value per term, even if several terms are about one token.
    columns: list[Tensor | None] = [
        torch.zeros(len(terms.index), dtype=torch.float64, device=factors.device) if is_read else None
        for is_read in (reads.logprobs, reads.entropies, reads.values, reads.divergence is not None)
    ]
    for mine, values in parts:
        for column, value in zip(columns, values[: len(columns)], strict=True):
            if column is not None and value is not None:
                column[mine] = value.double()
    leaves = [column.requires_grad_() for column in columns if column is not None]
    logprobs, entropies, values_before, divergences = columns
    # index [0, 1, ..., N - 1]: each term reads a separate value; in the packed row, terms of one token share one.
    own = replace(terms, index=each)
    loss, _ = objective_loss(
        logprobs, entropies, own, factors, objective, values=values_before, divergences=divergences
    )
    slopes = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    value = loss.detach()
    for i in range(num):
        mine, scores = _scores_alone(plain, batch, reads, law, i)
        read = [number for number in scores if number is not None]
        # sum of slope * x has the gradient sum of slope * dx, which is the chain rule
        chained = [(x.double() * slope[mine]).sum() for x, slope in zip(read, slopes, strict=True)]
        total = torch.stack(chained).sum()
        yield total - total.detach() + value  # the gradient of `total` with the value `value`
        value = torch.zeros_like(value)


@dataclass(frozen=True)
class _SampledLaw:
    """Temperature of each term, float64 [N], and the kept sets of the scored tokens if the loss is about them."""

    temperature: Tensor
    kept: RaggedTensor | None

    @classmethod
    def of(cls, terms: TermTensors, objective: Objective) -> _SampledLaw:
        return cls(_term_temperatures(terms, objective), terms.kept_ids if objective.is_policy else None)

    def sets(self, index: Tensor) -> Tensor:
        """Return the sets of the scored tokens `index`, int64 [n, largest], filled up with -1."""
        if self.kept is None:
            return torch.zeros(len(index), 0, dtype=torch.int64, device=index.device)
        own = self.kept[index.long()]
        places = torch.arange(int(own.sizes.max()) if len(own) else 0, device=index.device)
        ids = torch.full((len(own), len(places)), -1, device=index.device)
        ids[places < own.sizes[:, None]] = own.values.long()
        return ids


def _term_temperatures(terms: TermTensors, objective: Objective) -> Tensor:
    """Return the temperature of each term, float64 [N]: of the data or objective for a policy loss, 1 for others."""
    if not objective.is_policy:
        return terms.weight.new_ones(len(terms.index))
    fill = 1.0 if objective.temperature is None else objective.temperature
    if terms.temperature is None:
        return terms.weight.new_full((len(terms.index),), fill)
    of_terms = terms.temperature[terms.index]  # float32, so the filled values are rounded to it too
    return torch.where(of_terms.isnan(), torch.full_like(of_terms, fill), of_terms).double()


def _scores_alone(
    plain: PlainModel, batch: Batch, reads: ScoreRequest, law: _SampledLaw, i: int
) -> tuple[Tensor, TokenScores]:
    """Run trajectory `i` alone; return the indices of its terms, and the numbers that the objective reads of them."""
    terms = batch.terms
    assert terms is not None
    mine = (terms.trajectory == i).nonzero().squeeze(-1)
    path = _path(batch, i)
    # Row tokens to positions in the trajectory: path [0, 1, 4, 5], tokens [4, 5] -> [2, 3]. A path ascends.
    positions = torch.searchsorted(path, terms.tokens[terms.index[mine]])
    tokens, labels = plain.replay(batch, path), batch.input_ids[path[positions]]
    logprobs = entropies = values = divergences = None
    if reads.divergence is not None:
        assert terms.teacher is not None
        teacher, beta = terms.teacher[terms.index[mine]], reads.divergence

        def compare(logits: Tensor, temperature: Tensor, places: Tensor) -> Tensor:
            return _divergence_alone(logits, teacher[places], temperature, beta)

        every = torch.arange(len(mine), device=mine.device)
        divergences = torch.cat(plain.reduce(tokens, positions - 1, compare, law.temperature[mine], every))
    if reads.logprobs:
        columns = labels, law.temperature[mine], law.sets(terms.index[mine])
        parts = plain.reduce(tokens, positions - 1, _label_statistics, *columns)
        logprobs, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
    if reads.values:
        values = plain.values(tokens, positions - 1)
    return mine, TokenScores(logprobs, entropies if reads.entropies else None, values, divergences)


def _divergence_alone(logits: Tensor, law: TeacherLaw, temperature: Tensor, beta: float) -> Tensor:
    """Return the divergences [n] from the whole softmax of logits [n, V], differentiable by autograd.

    Words outside of the teacher's top K are one outcome, whose probabilities are 1 minus the sum of the others.
    """
    logs = (logits / temperature.to(logits.dtype)[:, None]).log_softmax(-1)
    teacher = law.logprobs(temperature, logs.dtype)
    if law.ids is not None:
        words = logs.shape[1]
        used = (teacher > -torch.inf) & (law.ids < words)
        teacher, ids = teacher.masked_fill(~used, -torch.inf), law.ids.masked_fill(~used, words)
        outside = logs.new_ones(len(logs), words + 1).scatter(-1, ids, 0.0)[:, :words]
        rest, is_whole = (logs.exp() * outside).sum(-1), ~outside.any(-1)
        logs = torch.where(used, logs.gather(-1, ids.clamp(max=words - 1)), -torch.inf)
        logs = torch.cat([logs, torch.where(is_whole, -torch.inf, rest.clamp(min=1e-300).log())[:, None]], -1)
        teacher = torch.cat(
            [teacher, torch.where(is_whole, -torch.inf, log_rest(teacher, law.values.dtype))[:, None]], -1
        )
    p, q = logs.exp(), teacher.exp()
    mean = ((1 - beta) * p + beta * q).clamp(min=1e-300).log()
    # 0 * log 0 = 0, without a NaN in the gradient
    logs, teacher = (torch.where(each > -torch.inf, each, 0.0) for each in (logs, teacher))
    forward, reverse = q * (teacher - (logs if beta == 0 else mean)), p * (logs - (teacher if beta == 1 else mean))
    return (reverse if beta == 1 else forward if beta == 0 else beta * forward + (1 - beta) * reverse).sum(-1)


def _label_statistics(logits: Tensor, labels: Tensor, temperature: Tensor, sets: Tensor) -> tuple[Tensor, Tensor]:
    z = logits / temperature.to(logits.dtype)[:, None]
    if sets.shape[1]:
        # The words of each set, all for an empty one; bool [n, V + 1], whose last column is for the places without id.
        is_kept = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool, device=z.device)
        is_kept.scatter_(1, torch.where(sets < 0, z.shape[1], sets), value=True)
        is_kept |= (sets < 0).all(-1, keepdim=True)
        z = z.masked_fill(~is_kept[:, :-1], -torch.inf)
    logs = z.log_softmax(-1)
    finite = logs.masked_fill(logs == -torch.inf, 0)  # 0 log 0 = 0
    return logs.gather(-1, labels[:, None]).squeeze(-1), -(logs.exp() * finite).sum(-1)


def _path(batch: Batch, i: int) -> Tensor:
    """Return the tokens of trajectory `i` by their parents, int64 [L], ascending: the mask is not read."""
    path = path_to(batch.parent.cpu().numpy(), int(batch.trajectory_ends[i]))
    return torch.from_numpy(path).to(batch.input_ids.device)
