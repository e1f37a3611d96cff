"""The four arms of TRACE's table 1 (arXiv 2606.11119): each of the two stages uniform or active, all else equal.

    candidates --stage 1--> rollouts of prompts --stage 2--> continuations of prefixes --> trees
    trees --refit--> predictor of the next round       --learn--> policy of the next round

                 uniform                                       active
    stage 1      equally many for half of the candidates       allocate_roots of the predicted values
    stage 2      at random prefixes of each rollout            allocate_prefixes of the predicted values

A round has M rollouts of prompts and M N continuations, which count as M (1 + N / 2) rollouts (algorithm 1, appendix
E.5), the number of a step of the other arms. The predictor is the one of `treepack values`: the policy's weights with a
scalar head, separate from the policy that is trained. It is refitted after each round in every arm, so that its
correlations can be compared; only active stages use it. The first round is uniform in every arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import State
from learner import learn, trajectories_of
from tasks import rewards_of, sample_trees

import treepack
from treepack.research.predictor.fit import accumulate
from treepack.research.predictor.model import ValueModel, end_states, node_values, start_values
from treepack.research.predictor.prediction_data import prediction_table
from treepack.research.predictor.rows import AnchorRow, anchor_prefixes, anchor_rows, draw_nodes
from treepack.research.trace.allocation import allocate_roots
from treepack.research.trace.expansion import prefix_table
from treepack.research.trace.options import BudgetExperiment
from treepack.research.trace.predictions import ValuePredictions, correlations, group_ids
from treepack.research.trace.simulation import spread_continuations, spread_rollouts
from treepack.research.trace.targets import anchors, binary_rewards, effective_ratio, recursive_targets
from treepack.rl.leaf_weights import leaf_weights
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.recorded import prefix_parts
from treepack.rollout.tree import Tree
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie

EXPAND = 2  # N
UNIFORM_ROLLOUTS = 4  # of a prompt that uniform allocation selects
# An update has few and short rows: with long ones a round would have one or two updates, and a predictor that starts
# without a head could not follow the policy.
CAPACITY, ROWS_PER_STEP = 2048, 2
# The epochs of appendix E.6. Its rate of 3e-5 belongs to a model of 0.6 billion parameters, and its share of 0.06 to
# steps with many prompts: here it would be three prefixes a round, while the policy moves.
EPOCHS, RATE, PREFIX_SHARE = 2, 3e-4, 0.8
SOURCE = "the predictor of the arm"  # in messages


@dataclass(frozen=True, slots=True)
class Predictor:
    """The model with its head, its optimiser, which lives as long as the arm, and the segments of rollouts."""

    model: ValueModel
    optimiser: torch.optim.Optimizer
    segment: str


@dataclass(frozen=True, slots=True)
class Continuations:
    """`count` continuations of the first `size` tokens of a rollout, or rollouts of a prompt if `rollout` is None."""

    group: str
    rollout: str | None
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class TraceArm:
    """Each stage uniform or active; credit and objective of TreeRPO."""

    roots: bool
    prefixes: bool

    def step(self, state: State) -> tuple[int, dict[str, Any]]:
        """Play a round.

        `reused` are tokens of the prefixes of continuations after their prompts: an engine that keeps no keys computes
        them again, once for each continued prefix, and none of them is decoded.
        """
        learner, task = state.learner, state.learner.task
        if "predictor" not in state.memory:
            state.memory["predictor"] = start_predictor(state)
        predictor: Predictor = state.memory["predictor"]
        active = (self.roots, self.prefixes) if state.step > 1 else (False, False)
        # 32 prompts of 16 rollouts: 512 = M (1 + 2 / 2), M = 256, and 64 of 128 candidates with 4 rollouts each.
        rollouts = int(state.sizes.prompts * state.sizes.width / (1 + EXPAND / 2))
        candidates = state.queries(max(2, 2 * rollouts // UNIFORM_ROLLOUTS))
        seed = state.step_seed("rollouts")
        rng, shape = np.random.default_rng(seed), task.independent(1)
        if active[0]:
            count = allocate_roots(prompt_values(predictor, candidates), rollouts)
        else:
            experiment = BudgetExperiment(candidates=len(candidates), budget=rollouts, expand=EXPAND)
            count = spread_rollouts(experiment, rng)
        queries = {each.group_id: replace(each, count=int(n)) for each, n in zip(candidates, count, strict=True) if n}
        bare = sample_trees(task, list(queries.values()), learner.engine, shape, seed=seed)
        trie = treepack.build_trie(trajectories_of(bare))
        predicted = predictions(predictor, trie)
        lines = (
            active_lines(trie, predicted, predictor.segment)
            if active[1]
            else uniform_lines(trie, predictor.segment, rng)
        )
        more, options = continuation_queries(trie, lines, queries, shape)
        grown = sample_trees(task, more, learner.engine, options, seed=seed)
        whole = treepack.build_trie(trajectories_of([*bare, *grown]))
        figures = {
            **allocation_figures(whole, bare, grown, queries),
            **correlation_figures(predicted, whole, predictor.segment),
            "value_loss": refit(predictor, whole, seed=seed),
            **learn(learner, [*bare, *grown], "treerpo", version=state.step),
        }
        return figures["step_decoded"], figures


def start_predictor(state: State) -> Predictor:
    """Return a predictor with the policy's weights and a new head, which gives every prompt the value 0.5."""
    policy = state.learner.policy
    model = start_values(Path(policy.source), "fp32", "auto", policy.device, state.seed)
    parameters = [*model.loaded.causal.model.parameters(), *model.head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    return Predictor(model, optimiser, state.learner.task.segment)


def prompt_values(predictor: Predictor, queries: Sequence[Query]) -> Float64:
    """Return the predicted chance of success of each query, float64 [n]."""
    # A prompt as a whole trajectory: equal prompts share their tokens, and each has an end.
    trie = treepack.build_trie(
        treepack.trajectories_from_arrays(
            [query.prompt for query in queries], [np.ones(len(query.prompt), np.int32) for query in queries]
        )
    )
    rows = treepack.plan_packing(trie, treepack.PackOptions(capacity=CAPACITY))
    # A trajectory is named by its number, and its last token is the end of its prompt.
    ends = [
        AnchorRow(row, np.array(row.trajectory_ids, np.int64), row.trajectory_ends.astype(np.int64)) for row in rows
    ]
    return node_values(predictor.model, ends, num_inner=len(queries))


def predictions(predictor: Predictor, trie: Trie) -> ValuePredictions:
    """Return the predicted values of the prompts of `trie` and of every prefix of its rollouts."""
    ends = anchors(trie, segment=predictor.segment)
    prefixes = anchor_prefixes(trie, ends)
    rows = anchor_rows(prefixes, np.arange(ends.tree.num_inner), capacity=CAPACITY)
    values = node_values(predictor.model, rows, num_inner=ends.tree.num_inner)
    lines = prediction_table(trie, ends, values).to_pylist()
    roots = sorted((line["group_id"], line["value"]) for line in lines if line["turn"] is None)
    below = {(line["trajectory_id"], line["turn"]): line for line in lines if line["turn"] is not None}
    return ValuePredictions(
        path=SOURCE,
        group_ids=[name for name, _ in roots],
        root_value=np.array([value for _, value in roots]),
        max_rollouts=np.full(len(roots), np.iinfo(np.int64).max),
        prefix_value={key: line["value"] for key, line in below.items()},
        prefix_group={key: line["group_id"] for key, line in below.items()},
    )


def refit(predictor: Predictor, trie: Trie, *, seed: int) -> float:
    """Fit the predictor on the shares of successes below prompts and prefixes of `trie`: equation 19.

    Returns:
        The mean squared error of the first epoch, each row before its update.
    """
    ends = anchors(trie, segment=predictor.segment)
    target = recursive_targets(ends.tree, binary_rewards(trie), leaf_weights(trie))[0]
    prefixes = anchor_prefixes(trie, ends)
    rows = anchor_rows(prefixes, draw_nodes(prefixes, prefix_share=PREFIX_SHARE, seed=seed), capacity=CAPACITY)
    rng, loaded = np.random.default_rng(seed), predictor.model.loaded
    parameters = [weights for group in predictor.optimiser.param_groups for weights in group["params"]]
    losses: list[float] = []
    for epoch in range(EPOCHS):
        order = rng.permutation(len(rows))
        for begin in range(0, len(rows), ROWS_PER_STEP):
            chosen = [rows[i] for i in order[begin : begin + ROWS_PER_STEP]]
            predictor.optimiser.zero_grad(set_to_none=True)
            loss = accumulate(predictor.model.head, chosen, target, lambda row: end_states(loaded, row))
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            predictor.optimiser.step()
            if epoch == 0:
                losses.append(loss)
    return float(np.mean(losses))


def active_lines(trie: Trie, predicted: ValuePredictions, segment: str) -> list[Continuations]:
    """Return the continuations that `treepack trace` would choose for the rollouts of `trie`."""
    table, _ = prefix_table(trie, predicted, expand=EXPAND, segment=segment)
    return [
        Continuations(line["group_id"], line["trajectory_id"], line["num_tokens"] or 0, line["num_continuations"])
        for line in table.to_pylist()
    ]


def uniform_lines(trie: Trie, segment: str, rng: np.random.Generator) -> list[Continuations]:
    """Return EXPAND continuations of random prefixes of each rollout.

    The continuations of rollouts without a prefix become half as many rollouts of their prompt.
    """
    prefixes = anchors(trie, segment=segment)
    count = spread_continuations(prefixes.trajectory, EXPAND, rng)
    names, groups = (trie.trajectories[name].to_pylist() for name in ("trajectory_id", "group_id"))
    chosen = np.flatnonzero(count)
    columns = (prefixes.trajectory[chosen], prefixes.num_tokens[chosen], count[chosen])
    lines = [
        Continuations(groups[i], names[i], size, more)
        for i, size, more in zip(*(column.tolist() for column in columns), strict=True)
    ]
    is_bare = np.bincount(prefixes.trajectory, minlength=trie.num_trajectories) == 0
    again: Int64 = np.bincount(prefixes.group[is_bare], minlength=prefixes.tree.num_groups) * EXPAND // 2
    named = zip(group_ids(trie, prefixes), again.tolist(), strict=True)
    return [*lines, *(Continuations(group, None, 0, more) for group, more in named if more)]


def continuation_queries(
    trie: Trie, lines: Sequence[Continuations], queries: dict[str, Query], shape: TreeOptions
) -> tuple[list[Query], list[TreeOptions]]:
    """Return the query of each line, and its options: a path has as many tokens in total as one from the prompt."""
    wanted = {(line.rollout, line.size): SOURCE for line in lines if line.rollout is not None}
    found = prefix_parts(trie, SOURCE, wanted)
    made, options = [], []
    for line in lines:
        query = queries[line.group]
        if line.rollout is None:
            # Another key than that of the first rollouts, so that ids and seeds differ from theirs.
            made.append(replace(query, key=f"{line.group}@{len(query.prompt)}", count=line.count))
            options.append(shape)
            continue
        prefix = found[line.rollout, line.size]
        made.append(
            Query(
                key=f"{line.rollout}@{line.size}",
                group_id=line.group,
                prompt=prefix.ids,
                count=line.count,
                parent_rollout=line.rollout,
                turns=prefix.turns,
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
    ratio = effective_ratio(np.unique(groups, return_inverse=True)[1], binary_rewards(whole))
    prefixes = [tree for tree in grown if tree.query.parent_rollout is not None]
    outcome = {f"{tree.query.key}/{i}": leaf.reward for tree in bare for i, leaf in enumerate(tree.leaves)}
    # A prefix flips if one of its continuations ends otherwise than the rollout did.
    flipped = [any(leaf.reward != outcome[str(tree.query.parent_rollout)] for leaf in tree.leaves) for tree in prefixes]
    return {
        "leaves": sum(len(tree.leaves) for tree in (*bare, *grown)),
        "step_decoded": sum(tree.usage.decoded for tree in (*bare, *grown)),
        "reused": sum(tree.root.end - len(queries[tree.query.group_id].prompt) for tree in prefixes),
        "prompts": len(bare),
        "mixed": round(ratio.of_anchors * ratio.num_anchors),
        "root_ratio": ratio.of_anchors,
        "prefix_ratio": float(np.mean(flipped)) if flipped else None,
        "reward": float(np.mean([reward for tree in bare for reward in rewards_of(tree)])),
    }


def correlation_figures(predicted: ValuePredictions, whole: Trie, segment: str) -> dict[str, float | None]:
    """Return Spearman's correlation of the predictions with the shares of successes below prompts and prefixes."""
    levels = correlations(predicted, whole, anchors(whole, segment=segment), binary_rewards(whole))
    return {f"spearman_{name.replace(' ', '_')}": levels[name].rho for name in levels}


ARMS = {
    "trace-uniform": TraceArm(roots=False, prefixes=False),
    "trace-roots": TraceArm(roots=True, prefixes=False),
    "trace-prefixes": TraceArm(roots=False, prefixes=True),
    "trace": TraceArm(roots=True, prefixes=True),
}
