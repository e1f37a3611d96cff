"""What the terms of an optimiser step are divided by: known before its first row is loaded, whatever its rows.

    packed/ --trajectory_table--> one line per trajectory: row, group, weight, reward
    table, rows of a step --step_factors--> f of every trajectory of those rows (see `objectives`)

A group's trajectories may lie in several rows and a step's rows in any order: the sums are over the whole step, so the
loss depends neither on how trajectories were packed nor on how rows are accumulated. Data that an objective cannot be
computed from is refused here, before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute

from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.model.objectives import Objective, preference_pairs
from treepack.trajectory import Float64, Int64

_REMEDIES = {
    "term_token": "give the rollouts rewards, advantages or log-probabilities and pack them again",
    "term_advantage": "give every rollout an advantage (field advantage or advantages) and pack them again",
    "trajectory_rewards": "give every rollout a reward and pack them again",
    "term_sampling_logprob": "give every rollout the sampler's log-probabilities and pack them again, or leave out "
    "--importance-cap",
    "term_old_logprob": "write all of them with `treepack logprobs --column old`",
    "term_ref_logprob": "write them with `treepack logprobs --column ref`",
}


@dataclass(frozen=True)
class TrajectoryTable:
    """The K trajectories of a packed directory, in the order of its rows.

    `first` int64 [num_rows + 1]: those of row r are first[r] .. first[r + 1] - 1; group int64 [K], equal where step and
    group are; weight float64 [K], the sum of their term weights; pairs int64 [num_rows], the pairs that dpo compares
    within each row, and None for other losses.
    """

    first: Int64
    group: Int64
    weight: Float64
    pairs: Int64 | None


def check_columns(dataset: PackedDataset, objective: Objective) -> None:
    """Refuse a dataset that lacks what the objective reads.

    Raises:
        TreepackError: naming the column and the remedy.
    """
    if objective.loss == "sft":
        return
    name = objective.loss
    for column in ("term_token", *objective.columns):
        if column not in dataset.term_columns:
            raise TreepackError(f"{dataset.path}: has no {column}, which the loss {name} needs; {_REMEDIES[column]}")
    optional = ("term_old_logprob",) if objective.loss != "dpo" and "term_old_logprob" in dataset.term_columns else ()
    for column in (*objective.columns, *optional):
        for table in dataset.tables(["row_id", column]):
            missing = [compute.list_flatten(table[column]).null_count, table[column].null_count]
            if any(missing):
                empty = [
                    row for row, cell in zip(*table.to_pydict().values(), strict=True) if cell is None or None in cell
                ]
                raise TreepackError(
                    f"{dataset.path}: row {empty[0]} has no {column} for some trajectories, which the loss {name} "
                    f"needs; {_REMEDIES[column]}"
                )
    normalize = dataset.manifest["options"]["normalize"]
    if objective.denominator != "token" and normalize != "token" and objective.loss != "dpo":
        raise TreepackError(
            f"{dataset.path}: was packed with --normalize {normalize}, and the denominator {objective.denominator} "
            "would normalise its weights again; pack with --normalize token"
        )


def trajectory_table(dataset: PackedDataset, objective: Objective) -> TrajectoryTable:
    """Read the table; O(terms) in time, O(trajectories) in memory.

    Raises:
        TreepackError: for dpo, no pair at all, or a pair whose trajectories lie in two rows.
    """
    columns = ["trajectory_groups", "term_trajectory", "term_weight"]
    reads_rewards = objective.loss == "dpo"
    counts, names = [np.zeros(1, np.int64)], []
    weights: list[Float64] = []
    rewards: list[Float64] = []
    for table in dataset.tables([*columns, "trajectory_rewards"] if reads_rewards else columns):
        sizes = _sizes(table["trajectory_groups"])
        owner = np.repeat(np.cumsum(sizes) - sizes, _sizes(table["term_trajectory"])) + _flat(table["term_trajectory"])
        counts.append(sizes)
        weights.append(np.bincount(owner, _flat(table["term_weight"]), sizes.sum()).astype(np.float64))
        names += compute.list_flatten(table["trajectory_groups"]).to_pylist()
        rewards.append(_flat(table["trajectory_rewards"]) if reads_rewards else np.zeros(sizes.sum()))
    first = np.cumsum(np.concatenate(counts))
    row = np.repeat(np.arange(len(dataset)), np.diff(first))
    keys = [(dataset.steps[r], name) for r, name in zip(row.tolist(), names, strict=True)]
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    group = np.array([codes[key] for key in keys], np.int64)
    weight: Float64 = np.concatenate(weights)
    pairs = None
    if reads_rewards:
        reward = np.concatenate(rewards)
        pairs = _pairs_within(first, group, weight, reward)
        _refuse_split_pairs(dataset, row, [name for _, name in keys], group, np.where(weight > 0, reward, np.nan))
        if not pairs.any():
            raise TreepackError(
                f"{dataset.path}: no two trajectories of a group have different rewards, so dpo has no pair; "
                "give rollouts of one prompt the same group and their rewards"
            )
    return TrajectoryTable(first, group, weight, pairs)


def _sizes(column: pa.ChunkedArray) -> Int64:
    sizes: Int64 = compute.list_value_length(column).to_numpy().astype(np.int64)
    return sizes


def _flat(column: pa.ChunkedArray) -> Float64:
    values: Float64 = compute.list_flatten(column).to_numpy()
    return values


def _pairs_within(first: Int64, group: Int64, weight: Float64, reward: Float64) -> Int64:
    found = []
    for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        own = (torch.from_numpy(values[a:b]) for values in (group, reward, weight > 0))
        found.append(len(preference_pairs(*own)[0]))
    return np.array(found, np.int64)


def _refuse_split_pairs(dataset: PackedDataset, row: Int64, names: list[str], group: Int64, reward: Float64) -> None:
    """A group may lie in several rows only if all of its rewards are equal."""
    order = np.lexsort((row, group))
    order = order[~np.isnan(reward[order])]
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    for part in np.split(order, starts[1:]):
        if len(part) and row[part[0]] != row[part[-1]] and reward[part].min() < reward[part].max():
            ids = dataset.row_ids[[row[part[0]], row[part[-1]]]]
            raise TreepackError(
                f"{dataset.path}: rows {ids[0]} and {ids[1]} share the group {names[part[0]]}, whose pairs dpo "
                "compares within a row; pack with --method groups"
            )


def trainable_rows(dataset: PackedDataset, table: TrajectoryTable | None) -> Int64:
    """Indices of the rows that give a loss: with weight, or where an objective compares pairs, with a pair."""
    rows: Int64 = np.flatnonzero(dataset.total_weight if table is None or table.pairs is None else table.pairs)
    return rows


def step_factors(table: TrajectoryTable, rows: list[int], objective: Objective) -> list[Float64]:
    """The factors f of the trajectories of each row of an optimiser step; float64 [trajectories of the row] each.

    Trajectories without weight count for nothing, not for the number of trajectories or groups either. For dpo f is one
    over the pairs of the step, whatever the denominator.
    """
    members = [np.arange(table.first[row], table.first[row + 1]) for row in rows]
    if objective.loss == "dpo":
        assert table.pairs is not None
        factor = 1 / max(1, int(table.pairs[rows].sum()))
        return [np.full(len(own), factor) for own in members]
    every = np.concatenate(members)
    weight = table.weight[every]
    num = max(1, int((weight > 0).sum()))
    if objective.denominator == "token":
        sums = np.full(len(every), weight.sum())
    elif objective.denominator == "trajectory":
        sums = weight * num
    elif objective.denominator == "group":
        _, code = np.unique(table.group[every], return_inverse=True)
        per_group = np.bincount(code, weights=weight)
        sums = per_group[code] * max(1, int((per_group > 0).sum()))
    else:
        sums = np.full(len(every), float(num * objective.response_length))
    factors = np.divide(1.0, sums, out=np.zeros(len(every)), where=sums > 0)
    return np.split(factors, np.cumsum([len(own) for own in members])[:-1])
