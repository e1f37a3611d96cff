"""TRACE's predictor of success in memory: fitted on the rollouts of a moving policy, and asked before the next ones.

    folder of the policy --start_predictor--> Predictor
    Predictor, prompts --prompt_values--> values         before any rollout of them exists
    Predictor, trie --predictions--> ValuePredictions    of the prompts and of all prefixes of its rollouts
    Predictor, trie --refit--> loss                      two epochs on this round's targets, equation 19

The model and its rows are those of `treepack values`: the weights of the warmed-up policy with a scalar head, separate
from the policy that is trained. Its optimiser lives as long as the arm, as in TRACE (arXiv 2606.11119), appendix E.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import treepack
from treepack.research.predictor.fit import accumulate
from treepack.research.predictor.model import (
    ValueModel,
    end_states,
    node_values,
    prediction_table,
    start_values,
)
from treepack.research.predictor.rows import AnchorRow, anchor_prefixes, anchor_rows, draw_nodes
from treepack.research.trace.predictions import ValuePredictions
from treepack.research.trace.targets import anchors, binary_rewards, recursive_targets
from treepack.rl.leaf_weights import leaf_weights
from treepack.rollout.query import Query
from treepack.trajectory import Float64
from treepack.trie.trie import Trie

# An update has few and short rows: with long ones a round would have one or two updates, and a predictor that starts
# without a head could not follow the policy.
CAPACITY, ROWS_PER_STEP = 2048, 2
SOURCE = "the predictor of the arm"  # in messages


@dataclass(frozen=True, slots=True)
class Fitting:
    """How the predictor is fitted after each round: epochs, learning rate, and the share of prefixes in a batch.

    The epochs are those of TRACE, appendix E.6. Its rate of 3e-5 belongs to a model of 0.6 billion parameters, and its
    share of 0.06 to steps with many prompts: here it would be three prefixes a round, and values of prefixes would
    stay those of the first rounds while the policy moves.
    """

    epochs: int = 2
    rate: float = 3e-4
    prefix_share: float = 0.8


@dataclass(frozen=True, slots=True)
class Predictor:
    """The model with its head, and its optimiser. `segment` cuts rollouts as `values fit --segment` does."""

    model: ValueModel
    optimiser: torch.optim.Optimizer
    fitting: Fitting
    segment: str


def start_predictor(folder: Path, *, device: str, segment: str, seed: int, fitting: Fitting = Fitting()) -> Predictor:
    """Return a predictor with the policy's weights and a new head, which gives every prompt the value 0.5."""
    model = start_values(folder, "fp32", "auto", torch.device(device), seed)
    parameters = [*model.loaded.causal.model.parameters(), *model.head.parameters()]
    return Predictor(model, torch.optim.AdamW(parameters, lr=fitting.rate, weight_decay=0.0), fitting, segment)


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
    keys = [(line["trajectory_id"], line["turn"]) for line in lines]
    below = [(key, line) for key, line in zip(keys, lines, strict=True) if line["turn"] is not None]
    return ValuePredictions(
        path=SOURCE,
        group_ids=[name for name, _ in roots],
        root_value=np.array([value for _, value in roots]),
        max_rollouts=np.full(len(roots), np.iinfo(np.int64).max),
        prefix_value={key: line["value"] for key, line in below},
        prefix_group={key: line["group_id"] for key, line in below},
    )


def refit(predictor: Predictor, trie: Trie, *, seed: int) -> float:
    """Fit the predictor on the shares of successes below prompts and prefixes of `trie`.

    Returns:
        The mean squared error of the first epoch, each row before its update.
    """
    reward = binary_rewards(trie)
    ends = anchors(trie, segment=predictor.segment)
    target = recursive_targets(ends.tree, reward, leaf_weights(trie))[0]
    prefixes = anchor_prefixes(trie, ends)
    nodes = draw_nodes(prefixes, prefix_share=predictor.fitting.prefix_share, seed=seed)
    rows = anchor_rows(prefixes, nodes, capacity=CAPACITY)
    rng, loaded = np.random.default_rng(seed), predictor.model.loaded
    parameters = [part for group in predictor.optimiser.param_groups for part in group["params"]]
    losses: list[float] = []
    for epoch in range(predictor.fitting.epochs):
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
