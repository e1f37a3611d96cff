"""The denominators of an optimiser step's terms, computed before the first row of the step is loaded.

    packed/ --trajectory_table--> one entry per trajectory: row, group, rollout, weight of its terms, own weight, reward
    table, rows of a step --step_factors--> f of every trajectory of these rows (see `objectives`)

The trajectories of a group may be in several rows, and the rows of a step may come in any order. All sums are over the
whole step, so the loss depends neither on the packing of trajectories nor on the accumulation of rows. `check_columns`
refuses data that lacks a column of the objective, before a model is loaded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute

from treepack.columns import BY_PACKED, remedy
from treepack.data.dataset import PackedDataset
from treepack.data.mixture import AnyDataset, source_of_rows, sources_of
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.objectives.factors import denominator_factors
from treepack.objectives.needed_columns import check_needed_columns, optional_columns
from treepack.objectives.objective import Objective
from treepack.objectives.preferences import preference_pairs
from treepack.objectives.temperature import check_term_temperatures
from treepack.rl.rollout_parts import LOST_PARTS
from treepack.trajectory import Float64, Int64

_NUMBERS = "trajectory_rollout_numbers"
# `treepack advantages --rejected zero` keeps trajectories without these columns.
_REMAINING = "leave out groups that cannot be used (`treepack advantages --rejected drop`), and pack again"


@dataclass(frozen=True)
class TrajectoryTable:
    """The K trajectories of a packed directory, in the order of its rows.

    Attributes:
        first: int64 [num_rows + 1]; the trajectories of row r are first[r] .. first[r + 1] - 1.
        group: int64 [K], equal for trajectories of the same training step and group.
        rollout: int64 [K], equal for trajectories of the same rollout; None for a loss that does not read rollouts.
        weight: float64 [K], the sum of the weights of a trajectory's terms; for the denominator edge, the weights are
            multiplied by the factors of edges.
        own: float64 [K], the weight v of each trajectory, a factor of the weights of its terms.
        pairs: int64 [num_rows], the number of pairs within each row; None for losses that compare no pairs.
    """

    first: Int64
    group: Int64
    weight: Float64
    own: Float64
    pairs: Int64 | None
    rollout: Int64 | None = None

    @property
    def row(self) -> Int64:
        """The row of each trajectory, int64 [K]."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


def check_columns(dataset: AnyDataset, objective: Objective) -> None:
    """Refuse a dataset that lacks a column of the objective or has it for some trajectories only.

    Raises:
        TreepackError: as `needed_columns.check_needed_columns`; or a column is incomplete, or the loss cannot be
            computed at the temperatures of the data.
    """
    sources = sources_of(dataset)
    check_needed_columns(sources, objective)
    if not objective.has_terms:
        return
    for source in sources:
        _check_complete(source, objective)
    check_term_temperatures(sources, objective)


def has_whole_column(dataset: AnyDataset, column: str) -> bool:
    """Return True if the dataset has a value of the column for every trajectory of every row."""
    return column in dataset.term_columns and not any(
        _first_incomplete(source, column).num_rows for source in sources_of(dataset)
    )


def _check_complete(dataset: PackedDataset, objective: Objective) -> None:
    """Refuse a column of the objective that has no value for some trajectories."""
    # Without old log-probabilities every ratio is 1. If only some terms had them, the other ratios would be NaN.
    # Without old values nothing is clipped.
    optional = [column for column in optional_columns(objective) if column in dataset.term_columns]
    for column in (*objective.columns, *optional):
        incomplete = _first_incomplete(dataset, column)
        if incomplete.num_rows:
            raise TreepackError(
                f"{dataset.path}: row {incomplete['row_id'][0]} has no {column} for some trajectories, which the loss "
                f"{objective.name} needs; {_REMAINING if BY_PACKED[column].is_computed else remedy(column)}"
            )


def _first_incomplete(dataset: PackedDataset, column: str) -> pa.Table:
    """Return the `row_id` of the first row that lacks a value of the column; none if all have all values."""
    return dataset.once_per_machine(f"incomplete-{column}", functools.partial(_incomplete, dataset, column))


def _incomplete(dataset: PackedDataset, column: str) -> pa.Table:
    first: list[int] = []
    for table in dataset.tables(["row_id", column]):
        # A cell is a list with one value per term or trajectory: null values in lists, and null lists.
        values = compute.list_flatten(table[column])
        has_empty = schema.is_ragged(table[column].type) and 0 in compute.list_value_length(values).unique().to_pylist()
        if values.null_count or table[column].null_count or has_empty:
            cells = zip(*table.to_pydict().values(), strict=True)
            first = [row for row, cell in cells if cell is None or None in cell or [] in cell][:1]
            break
    return pa.table({"row_id": pa.array(first, pa.int64())})


def trajectory_table(dataset: AnyDataset, objective: Objective) -> TrajectoryTable:
    """Read the trajectory table of a directory; O(terms) in time, O(trajectories) in memory.

    Raises:
        TreepackError: for a loss of pairs, if there is no pair, or if the trajectories of a pair are in two rows.
    """
    reads_rewards, factor = objective.has_pairs, objective.weighing.column
    rollouts = "trajectory_rollouts" if reads_rewards else _NUMBERS if objective.is_by_rollout else None
    kind = ("-rewards" if reads_rewards else "-edges" if factor else "") + "-rollouts" * objective.is_by_rollout
    name = f"trajectories{kind}"
    read = functools.partial(_trajectories, reads_rewards=reads_rewards, rollouts=rollouts, factor=factor)
    tables = [source.once_per_machine(name, functools.partial(read, source)) for source in sources_of(dataset)]
    counts = [np.bincount(table["row"], minlength=len(s)) for table, s in zip(tables, sources_of(dataset), strict=True)]
    # counts [2, 1, 3] -> first [0, 2, 3, 6] -> row of each trajectory [0, 0, 1, 2, 2, 2]
    first = np.cumsum(np.concatenate([[0], *counts]))
    row = np.repeat(np.arange(len(dataset)), np.diff(first))
    names = [name for table in tables for name in table["group"].to_pylist()]
    # A group name may come back in another training step or directory; it is then another group.
    source = source_of_rows(dataset).tolist()
    keys = [(source[r], dataset.steps[r], name) for r, name in zip(row.tolist(), names, strict=True)]
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    group = np.array([codes[key] for key in keys], np.int64)
    weight: Float64 = np.concatenate([table["weight"].to_numpy() for table in tables])
    own: Float64 = np.concatenate([table["own"].to_numpy() for table in tables])
    pairs = None
    if reads_rewards:
        reward = np.concatenate([table["reward"].to_numpy() for table in tables])
        rollout = np.concatenate([table["rollout"].to_numpy() for table in tables])
        _refuse_parts(dataset, row, rollout, np.where(weight > 0, first[row] + rollout, -1), reward, objective.name)
        pairs = _count_pairs(first, group, weight, reward, rollout)
        # A trajectory without weight is in no pair, so its reward must not split one.
        _refuse_split_pairs(
            dataset, row, [name for _, _, name in keys], group, np.where(weight > 0, reward, np.nan), objective.name
        )
        if not pairs.any():
            raise TreepackError(
                f"{dataset.path}: no two trajectories of a group have different rewards, so {objective.name} has no "
                "pair; give rollouts of one prompt the same group and their rewards"
            )
    table = TrajectoryTable(first, group, weight, own, pairs)
    if not objective.is_by_rollout:
        return table
    if objective.sequence_of == "rollout":
        _refuse_lost_parts(dataset, f"a sequence of {objective.name} is a whole rollout")
    numbers = np.concatenate([each["rollout"].to_numpy() for each in tables])
    where = (dataset.row_ids, f"{dataset.path}: ")
    return with_rollouts(table, numbers, source_of_rows(dataset)[row], where, objective)


def with_rollouts(
    table: TrajectoryTable, numbers: Int64, sources: Int64, where: tuple[Int64, str], objective: Objective
) -> TrajectoryTable:
    """Return `table` with the rollout of each trajectory, by its number (`RowTerms.rollout_number`) and directory.

    `where` has the ids of the rows, and the beginning of an error.

    Raises:
        TreepackError: a turn of several paths; or trajectories of one rollout that have different weights in the
            denominator rollout, or are in several rows for sequences of rollouts.
    """
    row_ids, start = where
    # A number may come back in another directory; it is then another rollout.
    rollout = np.unique(np.stack([sources, numbers]), axis=1, return_inverse=True)[1].astype(np.int64).reshape(-1)
    if (shared := np.flatnonzero(numbers < 0)).size:
        _refuse_shared(start, row_ids[table.row[shared[0]]], "the loss adds up the tokens of each rollout")
    known = np.flatnonzero(table.weight > 0)
    if objective.sequence_of == "rollout":
        _refuse_several_rows(table.row[known], rollout[known], where, objective.name)
    if objective.weighing.unit != "rollout":
        return replace(table, rollout=rollout)
    # Weights 2 and 3 of one rollout: the largest of the rollout is 3, and 2 differs from it.
    largest = np.zeros(len(rollout))
    np.maximum.at(largest, rollout[known], table.own[known])
    differ = known[table.own[known] != largest[rollout[known]]]
    if len(differ):
        raise TreepackError(
            f"{start}row {row_ids[table.row[differ[0]]]} has a trajectory of another weight than others of its rollout "
            "have, and the denominator rollout gives a rollout one weight; choose the denominator trajectory"
        )
    return replace(table, rollout=rollout)


def _refuse_several_rows(row: Int64, rollout: Int64, where: tuple[Int64, str], loss: str) -> None:
    """Refuse a rollout with trained tokens in two rows; `row` and `rollout` are of its trajectories."""
    order = np.lexsort((row, rollout))
    row, rollout = row[order], rollout[order]
    split = np.flatnonzero((np.diff(rollout) == 0) & (np.diff(row) != 0))
    if len(split):
        ids, start = where
        raise TreepackError(
            f"{start}rows {ids[row[split[0]]]} and {ids[row[split[0] + 1]]} have trajectories of one rollout, which is "
            f"one sequence of {loss} and must be in one row; pack with --method groups, or choose sequence_of "
            "trajectory"
        )


def _refuse_shared(where: str, row_id: int, reason: str) -> None:
    raise TreepackError(
        f"{where}row {row_id} has turns that several paths of a search tree share, and {reason}; build the trie "
        "without --expand turns, or with --per-path"
    )


def _check_lists(source: PackedDataset, table: pa.Table, sizes: Int64) -> None:
    """Check the lengths of the lists of terms and trajectories of some rows, and that each term has a trajectory.

    Raises:
        TreepackError: naming the directory and the column.
    """
    terms = _list_lengths(table["term_trajectory"])
    for name in table.column_names:
        expected = terms if name.startswith("term_") else sizes
        if not np.array_equal(_list_lengths(table[name]), expected):
            raise TreepackError(f"{source.path}: {name} has a list of another length in some row; pack the trie again")
    # Rows of 2 and 1 trajectories with the terms [0, 1, 1] and [0] -> limits [2, 2, 2, 1]
    owner, limits = _list_values(table["term_trajectory"]), np.repeat(sizes, terms)
    if ((owner < 0) | (owner >= limits)).any():
        raise TreepackError(f"{source.path}: term_trajectory points outside of some row; pack the trie again")


def _trajectories(source: PackedDataset, *, reads_rewards: bool, rollouts: str | None, factor: str | None) -> pa.Table:
    """Return the columns `row`, `group`, `weight` and `own` (`TrajectoryTable`) of the trajectories of all rows.

    With `reads_rewards` also `reward`, and `rollout` from the column `rollouts`, if one is given.

    The weights of terms are multiplied by the column `factor`, if there is one.
    """
    columns = ["trajectory_groups", "term_trajectory", "term_weight"]
    columns += ["trajectory_rewards"] * reads_rewards + ([] if factor is None else [factor])
    has_rollouts = rollouts in source.term_columns
    if rollouts == _NUMBERS and not has_rollouts and "trajectory_rollouts" in source.term_columns:
        raise TreepackError(
            f"{source.path}: was packed by an older treepack, and has no numbers of rollouts for the denominator "
            "rollout; pack the trie again"
        )
    columns += [rollouts] if rollouts is not None and has_rollouts else []
    has_own = "trajectory_weights" in source.term_columns
    columns += ["trajectory_weights"] * has_own
    counts, names, weights, rewards = [np.zeros(0, np.int64)], [], [np.zeros(0)], [np.zeros(0)]
    own_weights = [np.zeros(0)]
    numbers = [np.zeros(0, np.int64)]
    for table in source.tables(columns):
        sizes = _list_lengths(table["trajectory_groups"])  # trajectories of each row of the row group
        _check_lists(source, table, sizes)
        # term_trajectory counts within its row; owner counts within the row group. Rows of 2 and 1 trajectories with
        # the terms [0, 1, 1] and [0]: repeat([0, 2], [3, 1]) + [0, 1, 1, 0] = [0, 1, 1, 2]
        owner = np.repeat(np.cumsum(sizes) - sizes, _list_lengths(table["term_trajectory"])) + _list_values(
            table["term_trajectory"]
        )
        counts.append(sizes)
        of_terms = _list_values(table["term_weight"])
        if factor is not None:
            of_terms = of_terms * _list_values(table[factor])
        weights.append(np.bincount(owner, of_terms, sizes.sum()).astype(np.float64))
        own_weights.append(_list_values(table["trajectory_weights"]) if has_own else np.ones(sizes.sum()))
        names += compute.list_flatten(table["trajectory_groups"]).to_pylist()
        if reads_rewards:
            rewards.append(_list_values(table["trajectory_rewards"]))
        if has_rollouts:
            numbers.append(_list_values(table[rollouts]).astype(np.int64))
    rows = np.repeat(np.arange(len(source)), np.concatenate(counts))
    values = {"row": rows, "group": pa.array(names, pa.large_string()), "weight": np.concatenate(weights)}
    values["own"] = np.concatenate(own_weights)
    if reads_rewards:
        values["reward"] = np.concatenate(rewards)
    if rollouts is not None:
        # Without the column, each trajectory is a rollout of its own: rows of 2 and 3 have the places [0 1 0 1 2].
        sizes = np.concatenate(counts)
        own = np.arange(len(rows)) - (0 if rollouts == _NUMBERS else np.repeat(np.cumsum(sizes) - sizes, sizes))
        values["rollout"] = np.concatenate(numbers) if has_rollouts else own
    return pa.table(values)


def _list_lengths(column: pa.ChunkedArray) -> Int64:
    sizes: Int64 = compute.list_value_length(column).to_numpy().astype(np.int64)
    return sizes


def _list_values(column: pa.ChunkedArray) -> Float64:
    values: Float64 = compute.list_flatten(column).to_numpy()
    return values


def _count_pairs(first: Int64, group: Int64, weight: Float64, reward: Float64, rollout: Int64) -> Int64:
    """Return the number of pairs within each row, int64 [num_rows]."""
    counts = []
    for start, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        columns = (torch.from_numpy(values[start:end]) for values in (group, reward, weight > 0, rollout))
        counts.append(len(preference_pairs(*columns)[0]))
    return np.array(counts, np.int64)


def _refuse_parts(dataset: AnyDataset, row: Int64, rollout: Int64, own: Int64, reward: Float64, loss: str) -> None:
    """Refuse rollouts that cannot be compared as wholes.

    `own` int64 [num_trajectories] is the first trajectory of each one's rollout over all rows, -1 without weight.

    Raises:
        TreepackError: turns of several paths, trajectories of one rollout with other rewards, or rollouts of which pack
            has dropped a trajectory.
    """
    shared = np.flatnonzero(rollout < 0)
    if len(shared):
        _refuse_shared(f"{dataset.path}: ", dataset.row_ids[row[shared[0]]], f"{loss} compares rollouts")
    known = np.flatnonzero(own >= 0)
    differ = known[~((reward[known] == reward[own[known]]) | (np.isnan(reward[known]) & np.isnan(reward[own[known]])))]
    if len(differ):
        raise TreepackError(
            f"{dataset.path}: row {dataset.row_ids[row[differ[0]]]} has trajectories of one rollout with different "
            f"rewards, and {loss} compares rollouts; give a rollout one reward"
        )
    _refuse_lost_parts(dataset, f"{loss} compares whole rollouts")


def _refuse_lost_parts(dataset: AnyDataset, reason: str) -> None:
    for source in sources_of(dataset):
        if (count := source.manifest["counts"].get(LOST_PARTS)) is not None:
            raise TreepackError(
                f"{source.path}: pack has dropped trajectories of {count:,} rollouts of several, and {reason}; pack "
                "with a larger --capacity"
            )


def _refuse_split_pairs(
    dataset: AnyDataset, row: Int64, names: list[str], group: Int64, reward: Float64, loss: str
) -> None:
    """Refuse a group in several rows, unless all of its rewards are equal and it has no pair."""
    # Trajectories sorted by group, then row: group [1, 0, 1, 0], row [0, 0, 1, 2] -> order [1, 3, 0, 2], whose parts
    # start at 0 and 2. The first and last entry of a part are in different rows if the group is split.
    order = np.lexsort((row, group))
    order = order[~np.isnan(reward[order])]
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    for part in np.split(order, starts[1:]):
        if len(part) and row[part[0]] != row[part[-1]] and reward[part].min() < reward[part].max():
            ids = dataset.row_ids[[row[part[0]], row[part[-1]]]]
            raise TreepackError(
                f"{dataset.path}: rows {ids[0]} and {ids[1]} share the group {names[part[0]]}, whose pairs {loss} "
                "compares within a row; pack with --method groups"
            )


def trainable_rows(dataset: AnyDataset, table: TrajectoryTable | None) -> Int64:
    """Return the indices of the rows with a loss: rows with weight or, for a loss of pairs, rows with a pair."""
    rows: Int64 = np.flatnonzero(dataset.total_weight if table is None or table.pairs is None else table.pairs)
    return rows


def step_factors(table: TrajectoryTable, rows: list[int], objective: Objective) -> list[Float64]:
    """Return the factors f of an optimiser step, one float64 [trajectories of the row] array per row.

    Trajectories without weight are ignored, also in the number of groups. The denominators trajectory and global count
    each trajectory as its own weight v, so that leaf weights and weights of records do not cancel. The denominator
    rollout counts each rollout, as these two do if a sequence is a rollout. For a loss of pairs, f is 1 / the number of
    pairs of the step; the denominator option has no effect.
    """
    # first [0, 2, 3, 6], rows [2, 0] -> members [3, 4, 5] and [0, 1]
    members = [np.arange(table.first[row], table.first[row + 1]) for row in rows]
    if objective.has_pairs:
        assert table.pairs is not None
        factor = 1 / max(1, int(table.pairs[rows].sum()))
        return [np.full(len(indices), factor) for indices in members]
    every = np.concatenate(members)
    unit = table.group if objective.weighing.unit != "rollout" or table.rollout is None else table.rollout
    values = (table.weight[every], table.own[every], unit[every])
    factors = denominator_factors(objective.weighing, *values, response_length=objective.response_length)
    return np.split(factors, np.cumsum([len(indices) for indices in members])[:-1])
