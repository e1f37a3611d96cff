"""Credit alignment: how near the gradient of each estimator is to the exact policy gradient, per rollout token.

    prompts --1,024 rollouts each, in two halves--> reference     the cosine of the halves bounds the figures
            --32 trees each--> a vector per estimator and tree    all estimators on the same trees
            --32 x as many independent rollouts--> the same       what the trees themselves cost or gain

All are gradients to ascend, of the mean over the prompts of the expected reward:

    g = 1/Q sum_q  1/n sum_i A_qi sum_t d log p(token t of rollout i)

The reference has A_qi = R_qi - b_q, with b_q the mean reward of the prompt's rollouts in the other half, which does not
depend on rollout i. An estimator gives its own A, for rollouts or tokens; `treerpo, edges` is TreeRPO's own objective
with one mean over the tokens of each edge (TRACE, equation 47). With leaf weights, rollouts are weighted in A and in
the sum over i. Nothing is clipped, because the policy that sampled is the one whose gradient is taken.

The record has the products of the vectors of each estimator, one line after the other, so a run that is cut is
continued.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner import EDGES, Learner, accumulate, start_learner, trajectories_of
from tables import read_records
from tasks import has_both_outcomes, pass_rates, sample_trees
from torch import Tensor

import treepack
from treepack.errors import TreepackError
from treepack.objectives.objective import Objective, choose_objective
from treepack.rl.advantages.estimate import AdvantageEstimates, estimate_advantages, with_advantages
from treepack.rollout.query import Query
from treepack.rollout.tree import Tree
from treepack.trie.trie import Trie

SUM = choose_objective("dr_grpo", response_length=1)  # 1/N sum_i sum_t: no division by lengths
PROMPT_SEED, TREE_SEED = 31, 1000
AT_ONCE = 4096  # rollouts of the reference that are sampled and packed together


@dataclass(frozen=True, slots=True)
class CreditSizes:
    """Numbers of a measurement."""

    prompts: int = 16
    rollouts: int = 1024  # of a prompt's reference
    trees: int = 32
    width: int = 16  # leaves of a tree
    pool: int = 128  # prompts that are screened
    screen: int = 64  # rollouts of the screening
    lowest: float = 0.1  # pass rate in the screening, because others have nearly no gradient
    highest: float = 0.9


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator of advantages with the objective that takes them."""

    options: dict[str, Any]  # of AdvantageOptions
    objective: Objective = SUM
    on_trees: bool = True  # or on as many independent rollouts


ON_TREES = {
    "dr-grpo": Estimator({"estimator": "dr-grpo"}),
    "grpo": Estimator({"estimator": "grpo"}),
    "treepo": Estimator({"estimator": "treepo"}),
    "treepo, size-weighted": Estimator({"estimator": "treepo", "size_weighted": True}),
    "treepo, without root": Estimator({"estimator": "treepo", "without_root": True}),
    "treepo, reject subgroups": Estimator({"estimator": "treepo", "reject_subgroups": True}),
    "treerpo": Estimator({"estimator": "treerpo"}),
    "tree-grpo": Estimator({"estimator": "tree-grpo"}),
    "tree-grpo, per segment": Estimator({"estimator": "tree-grpo", "per_segment": True}),
}
ESTIMATORS = {
    **ON_TREES,
    # Without leaf weights: an edge counts once, whatever its leaves weigh.
    "treerpo, edges": Estimator({"estimator": "treerpo", "edges": True}, EDGES),
    **{f"{name}, leaf weights": Estimator(each.options | {"leaf_weights": True}) for name, each in ON_TREES.items()},
    "independent, dr-grpo": Estimator({"estimator": "dr-grpo"}, on_trees=False),
    "independent, grpo": Estimator({"estimator": "grpo"}, on_trees=False),
}


def measure(policy: Path, path: Path, sizes: CreditSizes, *, device: str) -> None:
    """Measure the estimators that the record `path` does not have yet.

    Its first line has `halves`, the products of the two halves [2, 2], and the pass rates of the prompts. The line of
    an estimator has `gram` [T, T], the products of its vectors, `dots` [2, T], their products with the two halves, and
    `decoded` [T], tokens. T are the trees of each prompt; vector t is the mean over tree t of all prompts.

    Raises:
        TreepackError: the record has other sizes, or too few prompts can be used.
    """
    learner = start_learner(policy, device=device, rate=0.0)
    queries = screened(learner, sizes)
    saved = path.with_suffix(".pt")
    head, *records = read_records(path) if path.exists() and saved.exists() else [{}]
    if head and head["sizes"] != asdict(sizes):
        raise TreepackError(f"{path}: was measured with the sizes {head['sizes']}; give them, or a new --out")
    if not head:
        halves, rates = reference(learner, queries, sizes)
        torch.save(halves.cpu(), saved)
        head = {"task": learner.task.name, "sizes": asdict(sizes), "rates": rates, "halves": products(halves, halves)}
    halves = torch.load(saved).to(learner.policy.device)
    # Written again, because the last line may be incomplete.
    path.write_text("".join(json.dumps(record) + "\n" for record in (head, *records)))
    known = {record["estimator"] for record in records}
    tries: dict[bool, list[tuple[Trie | None, int]]] = {}
    for name, estimator in ESTIMATORS.items():
        if name in known:
            continue
        if estimator.on_trees not in tries:
            tries[estimator.on_trees] = list(sampled(learner, queries, sizes, on_trees=estimator.on_trees))
        vectors = torch.stack([estimator_gradient(learner, trie, estimator) for trie, _ in tries[estimator.on_trees]])
        record = {
            "estimator": name,
            "gram": products(vectors, vectors),
            "dots": products(halves, vectors),
            "decoded": [decoded for _, decoded in tries[estimator.on_trees]],
        }
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(name, flush=True)


def screened(learner: Learner, sizes: CreditSizes) -> list[Query]:
    """Return the first prompts of the pool with a pass rate in the limits.

    Raises:
        TreepackError: there are too few.
    """
    task, pool = learner.task, learner.task.queries(sizes.pool, seed=PROMPT_SEED)
    rates = pass_rates(sample_trees(task, pool, learner.engine, task.independent(sizes.screen), seed=1))
    is_usable = (sizes.lowest <= rates) & (rates <= sizes.highest)
    chosen = [query for query, usable in zip(pool, is_usable.tolist(), strict=True) if usable][: sizes.prompts]
    if len(chosen) < sizes.prompts:
        raise TreepackError(
            f"only {len(chosen)} of {sizes.pool} prompts have a pass rate from {sizes.lowest} to {sizes.highest}; make "
            "the policy again with a longer warm-up"
        )
    return chosen


def reference(learner: Learner, queries: Sequence[Query], sizes: CreditSizes) -> tuple[Tensor, list[float]]:
    """Return two independent estimates of the gradient, float32 [2, P], and the pass rate of each prompt."""
    shape = learner.task.independent(sizes.rollouts // 2)
    at_once = max(1, AT_ONCE // sizes.rollouts)
    total, rates = torch.zeros(()), list[float]()
    for begin in range(0, len(queries), at_once):
        some = queries[begin : begin + at_once]
        halves = [sample_trees(learner.task, some, learner.engine, shape, seed=seed) for seed in (2, 3)]
        means = [pass_rates(half) for half in halves]
        gradients = [
            gradient(learner, _minus_baseline(half, dict(zip([query.group_id for query in some], other, strict=True))))
            for half, other in zip(halves, reversed(means), strict=True)
        ]
        # A gradient is a mean over its prompts, so it counts as many times.
        total = total.to(gradients[0]) + len(some) * torch.stack(gradients)
        rates += np.mean(means, axis=0).tolist()
    return total / len(queries), rates


def _minus_baseline(trees: Sequence[Tree], baseline: dict[str, float]) -> Trie:
    """Return the rollouts of `trees` with their reward minus the baseline of their group as advantage."""
    trie = treepack.build_trie(trajectories_of(trees))
    of_rollout = np.array([baseline[group] for group in trie.trajectories["group_id"].to_pylist()])
    advantage = trie.trajectories["reward"].to_numpy() - of_rollout
    kept = np.arange(trie.num_trajectories)
    return with_advantages(trie, AdvantageEstimates(kept, advantage, None, Counter(), len(trees), None))


def sampled(
    learner: Learner, queries: Sequence[Query], sizes: CreditSizes, *, on_trees: bool
) -> Iterator[tuple[Trie | None, int]]:
    """Yield the trie of one group of rollouts for each query, and its decoded tokens, `sizes.trees` times.

    The trie is None if all groups have equal rewards: the gradient of such a step is 0.
    """
    task = learner.task
    shape = task.tree(sizes.width) if on_trees else task.independent(sizes.width)
    for number in range(sizes.trees):
        trees = sample_trees(task, queries, learner.engine, shape, seed=TREE_SEED + number)
        is_useful = any(has_both_outcomes([tree]) for tree in trees)
        trie = treepack.build_trie(trajectories_of(trees)) if is_useful else None
        yield trie, sum(tree.usage.decoded for tree in trees)


def estimator_gradient(learner: Learner, trie: Trie | None, estimator: Estimator) -> Tensor:
    """Return the gradient that an estimator takes from one tree for each prompt, float32 [P].

    A tree with equal rewards has advantages of 0 and counts among the prompts.
    """
    if trie is None:
        return torch.zeros_like(_flat(learner.policy))
    is_flat = estimator.options["estimator"] in ("grpo", "dr-grpo")
    more: dict[str, Any] = {} if is_flat else {"segment": learner.task.segment}
    options = treepack.AdvantageOptions(**estimator.options, **more, rejected="zero", reject_equal=False)
    trie = with_advantages(trie, estimate_advantages(trie, options), rejected="zero")
    return gradient(learner, trie, estimator.objective, leaf_weights=options.leaf_weights)


def gradient(learner: Learner, trie: Trie, objective: Objective = SUM, *, leaf_weights: bool = False) -> Tensor:
    """Return minus the gradient of an objective on a trie with advantages, float32 [P]; parameters in model order."""
    learner.policy.model.zero_grad(set_to_none=False)
    accumulate(learner.policy, trie, objective, leaf_weights=leaf_weights)
    vector = _flat(learner.policy).neg_()
    learner.policy.model.zero_grad(set_to_none=True)
    return vector


def _flat(policy: Any) -> Tensor:
    """Return a copy of the gradients of all parameters in one vector, 0 for those without one."""
    parameters = policy.model.parameters()
    return torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in parameters])


def products(one: Tensor, other: Tensor) -> list[list[float]]:
    """Return the inner products of the vectors [a, P] and [b, P] as lists [a][b], summed in float64."""
    # In slices, because a copy of all vectors in float64 would take three times their memory.
    total = torch.zeros(len(one), len(other), dtype=torch.float64, device=one.device)
    for some, of_other in zip(torch.split(one, 1 << 18, dim=1), torch.split(other, 1 << 18, dim=1), strict=True):
        total += some.double() @ of_other.double().T
    rows: list[list[float]] = total.tolist()
    return rows
