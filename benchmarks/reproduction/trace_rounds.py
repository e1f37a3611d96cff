"""A round of TRACE: roots and prefixes get rollouts, uniformly or by predicted values, and the policy takes one step.

    candidates --stage 1--> rollouts of prompts --stage 2--> continuations of prefixes --> trees
    trees --refit--> predictor of the next round       --learn--> policy of the next round

                 uniform                                       active
    stage 1      equally many for half of the candidates       allocate_roots of the predicted values
    stage 2      at random prefixes of each rollout            allocate_prefixes of the predicted values

TRACE (arXiv 2606.11119), algorithm 1, table 1 and appendix E.5: M rollouts and M N continuations, which count as
M (1 + N / 2) rollouts. The predictor is refitted after each round in every arm, so that its correlations can be
compared; only active stages use it. The first round is uniform in every arm, because the predictor has seen nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from learner import Learner, learn, publish, trajectories_of
from tasks import sample_trees
from trace_predictor import SOURCE, Predictor, predictions, prompt_values, refit

import treepack
from treepack.research.trace.allocation import allocate_roots
from treepack.research.trace.expansion import prefix_table
from treepack.research.trace.predictions import ValuePredictions, correlations, group_ids
from treepack.research.trace.simulation import BudgetExperiment, spread_continuations, spread_rollouts
from treepack.research.trace.targets import anchors, binary_rewards, effective_ratio
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.recorded import prefix_parts
from treepack.rollout.tree import Tree
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class Budget:
    """M = `rollouts` of `candidates` prompts, and N = `expand` continuations for each rollout."""

    candidates: int = 256
    rollouts: int = 512
    expand: int = 2

    def experiment(self) -> BudgetExperiment:
        """Return the budget of the simulated rounds, which the uniform stages use too."""
        return BudgetExperiment(candidates=self.candidates, budget=self.rollouts, expand=self.expand)


@dataclass(frozen=True, slots=True)
class Continuations:
    """`count` continuations of the first `size` tokens of a rollout, or rollouts of a prompt if `rollout` is None."""

    group: str
    rollout: str | None
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class Actors:
    """The state that a round changes: the policy of `learner`, which takes a step of `estimator`, and the predictor."""

    learner: Learner
    predictor: Predictor
    estimator: str = "treerpo"


def play_round(
    actors: Actors, candidates: Sequence[Query], budget: Budget, *, active: tuple[bool, bool], seed: int, version: int
) -> dict[str, Any]:
    """Sample the trees of a round, refit the predictor, take one optimiser step, and return figures.

    `active` is True for each of the two stages that uses predictions. Tokens: `step_decoded` were sampled. `reused` are
    tokens of the prefixes of continuations after their prompts: an engine that keeps no keys computes them again, once
    for each continued prefix, and none of them is decoded.
    """
    learner, predictor = actors.learner, actors.predictor
    rng = np.random.default_rng(seed)
    if active[0]:
        count = allocate_roots(prompt_values(predictor, candidates), budget.rollouts)
    else:
        count = spread_rollouts(budget.experiment(), rng)
    queries = {each.group_id: replace(each, count=int(n)) for each, n in zip(candidates, count, strict=True) if n}
    shape = learner.task.independent(1)
    bare = sample_trees(learner.task, list(queries.values()), learner.engine, shape, seed=seed)
    trie = treepack.build_trie(trajectories_of(bare))
    predicted = predictions(predictor, trie)
    if active[1]:
        lines = active_lines(trie, predicted, budget.expand, predictor.segment)
    else:
        lines = uniform_lines(trie, budget.expand, predictor.segment, rng)
    more, options = continuation_queries(trie, lines, queries, shape)
    grown = sample_trees(learner.task, more, learner.engine, options, seed=seed)
    rollouts = trajectories_of([*bare, *grown])
    whole = treepack.build_trie(rollouts)
    record = {
        **allocation_figures(whole, bare, grown, queries),
        **correlation_figures(predicted, whole, predictor.segment),
        "value_loss": refit(predictor, whole, seed=seed),
        **learn(learner, rollouts, actors.estimator),
    }
    publish(learner, version)
    return record


def active_lines(trie: Trie, predicted: ValuePredictions, expand: int, segment: str) -> list[Continuations]:
    """Return the continuations that `treepack trace` would choose for the rollouts of `trie`."""
    table, _ = prefix_table(trie, predicted, expand=expand, segment=segment)
    return [
        Continuations(line["group_id"], line["trajectory_id"], line["num_tokens"] or 0, line["num_continuations"])
        for line in table.to_pylist()
    ]


def uniform_lines(trie: Trie, expand: int, segment: str, rng: np.random.Generator) -> list[Continuations]:
    """Return `expand` continuations of random prefixes of each rollout.

    The continuations of rollouts without a prefix become half as many rollouts of their prompt.
    """
    prefixes = anchors(trie, segment=segment)
    count = spread_continuations(prefixes.trajectory, expand, rng)
    names, groups = (trie.trajectories[name].to_pylist() for name in ("trajectory_id", "group_id"))
    chosen = np.flatnonzero(count)
    lines = [
        Continuations(groups[i], names[i], size, more)
        for i, size, more in zip(
            prefixes.trajectory[chosen].tolist(),
            prefixes.num_tokens[chosen].tolist(),
            count[chosen].tolist(),
            strict=True,
        )
    ]
    is_bare = np.bincount(prefixes.trajectory, minlength=trie.num_trajectories) == 0
    again: Int64 = np.bincount(prefixes.group[is_bare], minlength=prefixes.tree.num_groups) * expand // 2
    named = zip(group_ids(trie, prefixes), again.tolist(), strict=True)
    return [*lines, *(Continuations(group, None, 0, more) for group, more in named if more)]


def continuation_queries(
    trie: Trie, lines: Sequence[Continuations], queries: dict[str, Query], shape: TreeOptions
) -> tuple[list[Query], list[TreeOptions]]:
    """Return the query of each line, and its options: a path has as many tokens in total as one from the prompt."""
    places = {(line.rollout, line.size): SOURCE for line in lines if line.rollout is not None}
    parts = prefix_parts(trie, SOURCE, places)
    made, options = [], []
    for line in lines:
        query = queries[line.group]
        if line.rollout is None:
            # Another key than that of the first rollouts, so that ids and seeds differ from theirs.
            made.append(replace(query, key=f"{line.group}@{len(query.prompt)}", count=line.count))
            options.append(shape)
            continue
        part = parts[line.rollout, line.size]
        made.append(
            Query(
                key=f"{line.rollout}@{line.size}",
                group_id=line.group,
                prompt=part.ids,
                count=line.count,
                parent_rollout=line.rollout,
                turns=part.turns,
                fields=query.fields,
            )
        )
        options.append(replace(shape, max_tokens=shape.max_tokens - (line.size - len(query.prompt))))
    return made, options


def allocation_figures(
    whole: Trie, bare: Sequence[Tree], grown: Sequence[Tree], queries: dict[str, Query]
) -> dict[str, Any]:
    """Return the counts of a round, and TRACE's effective ratios, equations 20 and 21."""
    groups = whole.trajectories["group_id"].to_pylist()
    code = np.unique(groups, return_inverse=True)[1]
    ratio = effective_ratio(code, binary_rewards(whole))
    prefixes = [tree for tree in grown if tree.query.parent_rollout is not None]
    outcome = {rollout: leaf.reward for tree in bare for rollout, leaf in zip(_names(tree), tree.leaves, strict=True)}
    # A prefix flips if one of its continuations ends otherwise than the rollout did.
    flipped = [any(leaf.reward != outcome[str(tree.query.parent_rollout)] for leaf in tree.leaves) for tree in prefixes]
    return {
        "leaves": sum(len(tree.leaves) for tree in (*bare, *grown)),
        "step_decoded": sum(tree.usage.decoded for tree in (*bare, *grown)),
        "reused": sum(tree.root.end - len(queries[tree.query.group_id].prompt) for tree in prefixes),
        "rollouts": sum(len(tree.leaves) for tree in bare),
        "continuations": sum(len(tree.leaves) for tree in grown),
        "prompts": len(bare),
        "mixed": round(ratio.of_anchors * ratio.num_anchors),
        "root_ratio": ratio.of_anchors,
        "rollout_ratio": ratio.of_rollouts,
        "prefix_ratio": float(np.mean(flipped)) if flipped else None,
        "reward": float(np.mean([leaf.reward for tree in bare for leaf in tree.leaves])),
    }


def _names(tree: Tree) -> list[str]:
    """Return the ids of the rollouts of a tree; see `rollout.records`."""
    return [f"{tree.query.key}/{number}" for number in range(len(tree.leaves))]


def correlation_figures(predicted: ValuePredictions, whole: Trie, segment: str) -> dict[str, float | None]:
    """Return Spearman's correlation of the predictions with the shares of successes below prompts and prefixes."""
    levels = correlations(predicted, whole, anchors(whole, segment=segment), binary_rewards(whole))
    return {f"spearman_{name.replace(' ', '_')}": levels[name].rho for name in levels}
