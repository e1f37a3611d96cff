"""PROS and its baselines: GRPO on queries of a fixed pool, which start at a prompt or at a reused prefix.

    GRPO               random originals
    dynamic sampling   random originals until enough groups have both outcomes; all their tokens count (DAPO)
    random queries     random originals and augmented queries: the paper's ablation
    PROS               originals and augmented queries, the ones with the estimated pass rate nearest to 0.5

Augmented queries are cut before the token of highest entropy of successful rollouts (PROS, section 3). Critic values
are not used: the arms have no critic. Every arm keeps the counts of its queries, so that the error of the estimated
pass rates can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from arms import State, sampled_figures
from learner import CAPACITY, Learner, learn, trajectories_of
from tasks import has_both_outcomes, rewards_of, sample_trees

import treepack
from treepack.model.forward import row_logprobs
from treepack.research.pros import selection
from treepack.research.pros.augmentation import augment
from treepack.research.pros.options import GibbsLength
from treepack.research.pros.pass_rates import LogOdds, estimate
from treepack.research.pros.signals import entropies_of_terms
from treepack.rollout.query import Query
from treepack.rollout.tree import Tree
from treepack.sequences import SpanView
from treepack.trajectory import Float64, Int32
from treepack.trie.trie import Trie

POOL_SEED = 2_000_000  # of the original prompts, equal in all runs
POOL_GROUPS = 16  # originals of the pool for each group of a step
FORGETTING = 0.9  # lambda, at every step
SWEEPS, BURN_IN = 60, 20
MAX_BATCHES = 4  # of dynamic sampling in one step


@dataclass(slots=True)
class Pool:
    """Queries by id, and the counts of their rollouts."""

    queries: dict[str, Query]
    counts: selection.QueryCounts

    def add(self, queries: Sequence[Query]) -> None:
        """Add queries that the pool does not have yet; the parent of an augmented one is a field."""
        new = [query for query in queries if query.key not in self.queries]
        self.queries |= {query.key: query for query in new}
        parents = [query.fields.get("parent_group") for query in new]
        self.counts, _ = selection.with_queries(self.counts, [query.key for query in new], parents)

    def names(self) -> list[str]:
        """Return the ids in the order of the counts."""
        names: list[str] = self.counts.query_id.to_pylist()
        return names

    def indices(self, trees: Sequence[Tree]) -> list[int]:
        """Return the position of the query of each tree among the counts."""
        index = {name: i for i, name in enumerate(self.names())}
        return [index[tree.query.key] for tree in trees]


Choose = Callable[[Pool, LogOdds, int, int], list[str]]


def random_originals(pool: Pool, log_odds: LogOdds, num: int, seed: int) -> list[str]:
    """Choose `num` random original prompts."""
    names = [name for name, parent in zip(pool.names(), pool.counts.parent.tolist(), strict=True) if parent < 0]
    return _draw(names, num, seed)


def random_queries(pool: Pool, log_odds: LogOdds, num: int, seed: int) -> list[str]:
    """Choose `num` random queries of both kinds."""
    return _draw(pool.names(), num, seed)


def nearest_queries(pool: Pool, log_odds: LogOdds, num: int, seed: int) -> list[str]:
    """Choose the `num` queries whose estimated pass rate is nearest to 0.5: PROS, section 4."""
    names = pool.names()
    return [names[i] for i in selection.nearest(log_odds.mean, num, seed=seed).tolist()]


def _draw(names: Sequence[str], num: int, seed: int) -> list[str]:
    chosen = np.random.default_rng(seed).choice(len(names), num, replace=False)
    return [names[i] for i in chosen.tolist()]


@dataclass(frozen=True, slots=True)
class PoolArm:
    """Queries of a pool that is the same in all runs at their start."""

    choose: Choose
    augmented: bool = False  # adds augmented queries to the pool
    max_batches: int = 1  # above 1: samples batches until enough groups have both outcomes, and trains those

    def step(self, state: State) -> tuple[int, dict[str, Any]]:
        """Train on the groups of the chosen queries."""
        learner, num = state.learner, state.sizes.prompts
        if "pool" not in state.memory:
            state.memory["pool"] = Pool({}, selection.empty_state())
            state.memory["pool"].add(learner.task.queries(POOL_GROUPS * num, seed=POOL_SEED))
        pool: Pool = state.memory["pool"]
        counts, sampling = pool.counts, GibbsLength(SWEEPS, BURN_IN, state.step_seed("estimate"))
        log_odds = estimate(counts.parent, counts.passed, counts.tried, sampling=sampling)
        names = self.choose(pool, log_odds, num * self.max_batches, state.step_seed("choice"))
        trees, useful = list[Tree](), list[Tree]()
        for begin in range(0, len(names), num):
            trees += sample_queries(state, [pool.queries[name] for name in names[begin : begin + num]])
            useful = [tree for tree in trees if self.max_batches == 1 or has_both_outcomes([tree])][:num]
            if len(useful) == num:
                break
        figures = sampled_figures(trees) | query_figures(pool, log_odds, trees)
        count_rollouts(pool, trees)
        if self.augmented:
            pool.add(augmented_queries(learner, pool, useful))
        figures |= {"pool": len(pool.queries), **learn(learner, useful, "grpo", version=state.step)}
        return sum(tree.usage.decoded for tree in trees), figures


def sample_queries(state: State, queries: Sequence[Query]) -> list[Tree]:
    """Return a group of independent rollouts for each query; a path has as many tokens as one from the prompt."""
    task = state.learner.task
    shape = task.independent(state.sizes.width)
    options = [replace(shape, max_tokens=task.max_tokens - query.fields.get("num_reused", 0)) for query in queries]
    return sample_trees(task, queries, state.learner.engine, options, seed=state.step_seed("rollouts"))


def query_figures(pool: Pool, log_odds: LogOdds, trees: Sequence[Tree]) -> dict[str, float]:
    """Return shares of the step's groups, and the error of the pass rates that were estimated before it.

    `rate_error` is the mean distance of estimated and observed rates, which contains the noise of the observed ones.
    `rate_square` is an unbiased estimate of the mean squared distance to the true rates.
    """
    estimated = log_odds.pass_rate[pool.indices(trees)]
    observed = np.array([np.mean(rewards_of(tree)) for tree in trees])
    width = np.array([len(tree.leaves) for tree in trees])
    return {
        "groups": len(trees),
        "augmented": float(np.mean([tree.query.untrained_prefix is not None for tree in trees])),
        "rate_error": float(np.mean(np.abs(estimated - observed))),
        "rate_square": float(np.mean(squared_errors(estimated, observed, width))),
    }


def squared_errors(estimated: Float64, observed: Float64, width: np.ndarray) -> Float64:
    """Return unbiased estimates of (estimated - true rate)^2 from rates observed in `width` >= 2 rollouts each."""
    # E (e - o)^2 = (e - p)^2 + p (1 - p) / n, and o (1 - o) / (n - 1) has the mean p (1 - p) / n.
    errors: Float64 = (estimated - observed) ** 2 - observed * (1 - observed) / (width - 1)
    return errors


def count_rollouts(pool: Pool, trees: Sequence[Tree]) -> None:
    """Forget a share of the counts of all queries, and add the rollouts of a step."""
    query = np.repeat(pool.indices(trees), [len(tree.leaves) for tree in trees])
    success = np.concatenate([np.array(rewards_of(tree)) > 0 for tree in trees])
    pool.counts = selection.forget_and_add(pool.counts, query, success, forgetting=FORGETTING)


def augmented_queries(learner: Learner, pool: Pool, trees: Sequence[Tree]) -> list[Query]:
    """Return the augmented query of every successful rollout; the policy must be the one that sampled them."""
    successful = [rollout for rollout in trajectories_of(trees) if (rollout.reward or 0.0) > 0]
    if not successful:
        return []
    trie = treepack.build_trie(successful)
    # In the maze a cut is between turns, because the environment replays whole turns.
    boundary = "turn" if learner.task.segment == "turn" else "token"
    spans = SpanView.of(trie.trajectories)
    index = {name: i for i, name in enumerate(trie.trajectories["trajectory_id"].to_pylist())}
    groups = trie.trajectories["group_id"].to_pylist()
    queries = []
    for each in augment(trie, entropies_of(learner, trie), boundary=boundary).queries:
        i, size = index[each.parent_trajectory], len(each.prompt_token_ids)
        source, (starts, ends, _) = pool.queries[groups[i]], spans[i]
        own = [(a, min(b, size)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True) if a < size]
        marks = {"query_id": each.query_id, "parent_group": each.parent_group, "num_reused": each.num_reused}
        queries.append(
            Query(
                key=each.query_id,
                group_id=each.query_id,
                prompt=each.prompt_token_ids,
                untrained_prefix=size,
                turns=(*source.turns, *own),
                fields=source.fields | marks,
            )
        )
    return queries


@torch.no_grad()
def entropies_of(learner: Learner, trie: Trie) -> list[Float64 | None]:
    """Return the entropies of the distributions of the trained tokens of each trajectory of `trie`."""
    scored: list[tuple[list[str], Int32, np.ndarray]] = []
    policy = learner.policy
    for row in treepack.plan_packing(trie, treepack.PackOptions(capacity=CAPACITY[policy.device.type])):
        batch = treepack.make_batch(row).to(policy.device)
        assert batch.terms is not None
        assert row.terms is not None
        _, entropies = row_logprobs(policy, batch, batch.terms.tokens)
        scored.append((row.trajectory_ids, row.terms.trajectory, entropies[batch.terms.index].cpu().numpy()))
    return entropies_of_terms(trie, scored)


ARMS = {
    "pool-grpo": PoolArm(random_originals),
    "pool-dynamic": PoolArm(random_originals, max_batches=MAX_BATCHES),
    "pool-random": PoolArm(random_queries, augmented=True),
    "pros": PoolArm(nearest_queries, augmented=True),
}
