"""Gradients of steps of sampled trees, packed with leaf weights, equal those of independent rollouts on average.

The law is a table of transitions, so that all of its responses can be listed. The exact mean of the gradient is the
sum over this list of probability times gradient, each rollout alone (`oracle_objectives`). Rollouts come from an old
policy, and the gradient is that of a newer one, so that ratios are not 1 and clipping has an effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.markov_law import MarkovLaw
from support.oracle_objectives import Rollout, step_loss
from support.sampled_trees import rollouts_of_tree, sample_trees
from support.tree_estimates import Estimate, mean_and_error
from treepack.data.batch import make_batch
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_packing
from treepack.pack.row import Row
from treepack.rollout.options import TreeOptions
from treepack.trajectory import Float64, Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie

STOP, START, LONGEST, STEPS, TREES = 0, 1, 5, 100, 3
# Log-probabilities of the next token (column) after a token (row). Token 1 ends responses soon, and such ones succeed.
NOW = torch.tensor([[0.0, 0.0, 0.0], [0.3, -0.5, 0.9], [-1.1, -0.4, 0.6]], dtype=torch.float64).log_softmax(-1)
OLD = (NOW + torch.tensor([[0.0, 0.0, 0.0], [0.4, -0.2, 0.1], [0.3, 0.5, -0.2]])).log_softmax(-1)
REF = (NOW * 0.7).log_softmax(-1)
SHAPE = TreeOptions(width=8, max_tokens=LONGEST, segment=1, depth=100, first_forks=2)
LENGTH = 3
CLAIMED = ("trajectory", "global")
LOSSES = ["ppo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "value"]
# One loss of tokens, one of sequences and one of values with each denominator; the slow tests have all of them.
QUICK = {("grpo", "trajectory"), ("gspo", "trajectory"), ("dr_grpo", "global"), ("value", "global")}


class Policy(torch.nn.Module):
    """A model whose logits and hidden states depend on the last token only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(NOW.clone())
        self.value_head = torch.nn.Linear(3, 1, dtype=torch.float64)
        self.value_head.weight.data = torch.tensor([[0.1, 0.4, -0.3]], dtype=torch.float64)
        self.value_head.bias.data.fill_(0.2)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        states = torch.nn.functional.one_hot(input_ids, 3).double()
        return SimpleNamespace(logits=self.table[input_ids], hidden_states=[states])

    def slope(self, loss: Tensor) -> float:
        """Return the derivative of `loss` by a shift of all parameters along a fixed direction."""
        parameters = list(self.parameters())
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        sizes = [torch.linspace(-1, 1.3, p.numel(), dtype=torch.float64).sin().reshape(p.shape) for p in parameters]
        return sum(float((g * s).sum()) for g, s in zip(found, sizes, strict=True) if g is not None)


def reward_of(response: Int32) -> float:
    return float(len(response) > 1 and response[-2:].tolist() == [1, STOP]) - 0.3


def scores(response: Int32, table: Tensor) -> Float64:
    ids = torch.from_numpy(np.concatenate([[START], response]).astype(np.int64))
    values: Float64 = table[ids[:-1], ids[1:]].numpy()
    return values


def credited(one: Trajectory) -> Trajectory:
    """The rollout with its own reward as advantage and return, and log-probabilities of both policies."""
    content = one.content
    assert isinstance(content, Tokens)
    response, size = content.tokens[1:], len(content.tokens) - 1
    columns: dict[str, Any] = {
        "old_logprob": scores(response, OLD).astype(np.float32),
        "ref_logprob": scores(response, REF).astype(np.float32),
        "returns": np.full(size, one.reward),
        "old_values": np.full(size, 0.1),
    }
    return replace(one, advantage=one.reward, content=replace(content, **columns))


@dataclass(frozen=True)
class Sampled:
    """Steps of trees, each as packed rows."""

    weighted: list[list[Row]]
    plain: list[list[Row]]


def sampled(shape: TreeOptions, *, trees: int, seed: int) -> Sampled:
    law = MarkovLaw(OLD.exp().numpy(), stop=STOP)
    grown = sample_trees(law, shape, [[START]] * (STEPS * trees), seed=seed, reward=reward_of)
    steps = [grown[i : i + trees] for i in range(0, len(grown), trees)]
    tries = [build_trie([credited(one) for tree in step for one in rollouts_of_tree(tree)]) for step in steps]
    options = PackOptions(capacity=40, method="contiguous", leaf_weights=True)
    weighted, plain = (
        [list(plan_packing(trie, replace(options, leaf_weights=used))) for trie in tries] for used in (True, False)
    )
    return Sampled(weighted, plain)


@pytest.fixture(scope="module")
def with_fallback() -> Sampled:
    return sampled(SHAPE, trees=TREES, seed=3)


def slope_of(rows: Sequence[Row], objective: Objective) -> float:
    """The slope of one optimiser step, whose rows come from packing."""
    policy = Policy()
    total: Any = 0
    for row, factors in zip(rows, row_factors(rows, objective), strict=True):
        batch = make_batch(row)
        assert batch.terms is not None
        tokens = batch.terms.tokens
        before = batch.input_ids[batch.parent[tokens]]
        logs = policy.table[before].log_softmax(-1)
        logprobs, entropies = logs[torch.arange(len(tokens)), batch.input_ids[tokens]], -(logs.exp() * logs).sum(-1)
        values = policy.value_head(torch.nn.functional.one_hot(before, 3).double())[:, 0]
        arguments = (logprobs, entropies, batch.terms, factors, objective)
        total = total + objective_loss(*arguments, values=values if objective.has_values else None)[0]
    return policy.slope(total)


def responses() -> list[list[int]]:
    """All responses of the law: up to the stop token, or cut off."""
    ended: list[list[int]] = []
    active: list[list[int]] = [[]]
    while active:
        longer = [[*each, token] for each in active for token in range(3)]
        ended += [each for each in longer if each[-1] == STOP or len(each) == LONGEST]
        active = [each for each in longer if each[-1] != STOP and len(each) < LONGEST]
    return ended


def exact_slope(objective: Objective) -> float:
    """The mean slope of one independent rollout: over all responses, each alone, by its probability."""
    policy, total = Policy(), 0.0
    for ids in responses():
        response = np.array(ids, np.int32)
        size, old = len(ids) + 1, scores(response, OLD)
        rollout = Rollout(
            tokens=[START, *ids],
            weights=[0.0, *[1.0] * len(ids)],
            advantages=[reward_of(response)] * size,
            old=[0.0, *old.tolist()],
            ref=[0.0, *scores(response, REF).tolist()],
            sampling=[0.0] * size,
            group="g",
            reward=reward_of(response),
            returns=[reward_of(response)] * size,
            old_values=[0.1] * size,
        )
        total += float(np.exp(old.sum())) * policy.slope(step_loss(policy, [rollout], objective))
    return total


def objective_of(loss: str, denominator: str) -> Objective:
    options: dict[str, Any] = {} if loss == "value" else {"kl": 0.1, "entropy": 0.02}
    length = {"response_length": LENGTH} if denominator == "global" else {}
    return choose_objective(loss, denominator=denominator, **options, **length)


@pytest.mark.parametrize(
    ("loss", "denominator"),
    [
        pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow])
        for each in itertools.product(LOSSES, CLAIMED)
    ],
)
def test_the_gradient_of_a_step_is_unbiased(loss: str, denominator: str, with_fallback: Sampled) -> None:
    objective = objective_of(loss, denominator)
    found = mean_and_error(slope_of(rows, objective) for rows in with_fallback.weighted)
    assert found.distance(exact_slope(objective)) < 3


@pytest.mark.parametrize(
    ("loss", "denominator"),
    [
        ("grpo", "trajectory"),
        pytest.param("gspo", "trajectory", marks=pytest.mark.slow),
    ],
)
def test_without_leaf_weights_it_is_not(loss: str, denominator: str, with_fallback: Sampled) -> None:
    objective = objective_of(loss, denominator)
    found = mean_and_error(slope_of(rows, objective) for rows in with_fallback.plain)
    assert found.distance(exact_slope(objective)) > 5


@pytest.mark.parametrize("loss", ["value", pytest.param("ppo", marks=pytest.mark.slow)])
def test_the_mean_over_tokens_is_a_ratio_of_unbiased_sums(loss: str, with_fallback: Sampled) -> None:
    """One step of all trees: its error is that of a ratio, and its bias is far smaller."""
    objective, total = objective_of(loss, "token"), objective_of(loss, "global")
    everything = slope_of([row for rows in with_fallback.weighted for row in rows], objective)
    tokens = np.array([sum(row.total_weight for row in rows) for rows in with_fallback.weighted])
    apart = [slope_of(rows, objective) * count for rows, count in zip(with_fallback.weighted, tokens, strict=True)]
    assert everything == pytest.approx(sum(apart) / tokens.sum(), rel=1e-12)
    error = float(np.sqrt(np.square(np.array(apart) - everything * tokens).sum()) / tokens.sum())
    length = sum(float(np.exp(scores(np.array(ids, np.int32), OLD).sum())) * len(ids) for ids in responses())
    exact = exact_slope(total) * LENGTH / length
    assert Estimate(everything, error).distance(exact) < 3


def test_the_list_of_responses_is_complete() -> None:
    total = sum(float(np.exp(scores(np.array(ids, np.int32), OLD).sum())) for ids in responses())
    assert total == pytest.approx(1, rel=1e-12)
