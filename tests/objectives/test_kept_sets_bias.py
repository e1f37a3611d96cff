"""Under top-p, the policy gradient over kept sets is unbiased, and that over the whole vocabulary is not.

The law is a table of transitions, cut to 90 % of the probability of each row, so that all of its responses can be
listed. The truth is the derivative of the mean reward of the cut law, with its sets held fixed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.strategies import make
from support.tree_estimates import mean_and_error
from treepack.data.batch import make_batch
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.token_loss import tree_logprobs
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_packing
from treepack.ragged import RaggedArray
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

START, WORDS, LENGTH, TOP_P = 1, 6, 3, 0.9
STEPS, ROLLOUTS = 60, 64
TABLE = torch.randn(WORDS, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1.5
OBJECTIVE = choose_objective("reinforce", denominator="global", response_length=LENGTH)


@functools.cache
def kept_words() -> list[list[int]]:
    """The words that top-p keeps after each word: the likeliest ones, until they have 90 % of the probability."""
    sets = []
    for row in TABLE.softmax(-1).numpy():
        order = np.argsort(-row)
        num = int(np.searchsorted(np.cumsum(row[order]), TOP_P)) + 1
        sets.append(sorted(order[:num].tolist()))
    assert min(map(len, sets)) <= WORDS // 2
    return sets


def cut_logs(table: Tensor) -> Tensor:
    """Log-probabilities of the cut law [WORDS, WORDS]; -inf outside of the sets."""
    outside = torch.ones(WORDS, WORDS, dtype=torch.bool)
    for word, own in enumerate(kept_words()):
        outside[word, own] = False
    return table.masked_fill(outside, -torch.inf).log_softmax(-1)


def reward_of(response: Iterable[int]) -> float:
    words = list(response)
    return float(words[-1] in (0, 3)) + 0.5 * len(set(words)) - 1.2


def truth() -> float:
    table = TABLE.clone().requires_grad_()
    logs, mean = cut_logs(table), torch.zeros((), dtype=torch.float64)
    for response in itertools.product(range(WORDS), repeat=LENGTH):
        steps = list(itertools.pairwise([START, *response]))
        if all(after in kept_words()[before] for before, after in steps):
            mean = mean + torch.stack([logs[pair] for pair in steps]).sum().exp() * reward_of(response)
    return slope(-mean / LENGTH, table)


def slope(loss: Tensor, table: Tensor) -> float:
    """Return the derivative by a shift of the table along a fixed direction, which has words outside of the sets."""
    (found,) = torch.autograd.grad(loss, table)
    direction = torch.linspace(-1, 1.3, found.numel(), dtype=torch.float64).sin().reshape(found.shape)
    return float((found * (direction + 2 * cut_logs(TABLE).isinf())).sum())


def rollout(number: int, response: list[int], *, with_sets: bool, weight: float = 1.0) -> Trajectory:
    columns: dict[str, Any] = {"advantage": reward_of(response), "weight": weight}
    if with_sets:
        sets = [kept_words()[word] for word in [START, *response[:-1]]]
        columns["kept_ids"] = RaggedArray.of(sets, np.int32)
    return make(f"t{number}", [START, *response], group=f"g{number}", **columns)


def slope_of_step(rollouts: list[Trajectory], *, with_sets: bool = True) -> float:
    """The slope of one optimiser step over packed rows, through the chunked output layer."""
    rows = list(plan_packing(build_trie(rollouts), PackOptions(capacity=64, method="contiguous")))
    table, total = TABLE.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for row, factors in zip(rows, row_factors(rows, OBJECTIVE), strict=True):
        batch = make_batch(row)
        terms = batch.terms
        assert terms is not None
        assert (terms.kept_ids is not None) == with_sets
        hidden = torch.nn.functional.one_hot(batch.input_ids, WORDS).double()
        targets = terms.tokens, batch.input_ids, batch.parent
        logprobs, entropies = tree_logprobs(hidden, OutputLayer(table.T), targets, kept=terms.kept_ids, chunk=50)
        total = total + objective_loss(logprobs, entropies, terms, factors, OBJECTIVE)[0]
    return slope(total, table)


@functools.cache
def steps(*, with_sets: bool) -> list[list[Trajectory]]:
    """Rollouts of the cut law for each step."""
    rng, probabilities = np.random.default_rng(0), cut_logs(TABLE).exp().numpy()
    result = []
    for _ in range(STEPS):
        words = np.full((ROLLOUTS, 1), START)
        for _ in range(LENGTH):
            after = [rng.choice(WORDS, p=probabilities[word]) for word in words[:, -1]]
            words = np.concatenate([words, np.array(after)[:, None]], axis=1)
        result.append([rollout(i, each, with_sets=with_sets) for i, each in enumerate(words[:, 1:].tolist())])
    return result


def test_the_mean_over_all_responses_is_the_truth() -> None:
    probabilities, rollouts = cut_logs(TABLE).exp().numpy(), []
    for i, response in enumerate(itertools.product(range(WORDS), repeat=LENGTH)):
        probability = float(np.prod([probabilities[pair] for pair in itertools.pairwise([START, *response])]))
        if probability:  # a rollout of this weight counts as so many equal ones
            rollouts.append(rollout(i, list(response), with_sets=True, weight=probability))
    assert slope_of_step(rollouts) == pytest.approx(truth(), rel=1e-9)


def test_steps_over_kept_sets_are_unbiased() -> None:
    found = mean_and_error(slope_of_step(step) for step in steps(with_sets=True))
    assert found.distance(truth()) < 3


def test_steps_over_the_whole_vocabulary_are_not() -> None:
    found = mean_and_error(slope_of_step(step, with_sets=False) for step in steps(with_sets=False))
    assert found.distance(truth()) > 5
