"""Allocations as tables for a rollout system: which prompts to roll out how often, which prefixes to continue.

    Predictions --root_table--> group_id, value, num_rollouts, utility                          every prompt
    Trie, Predictions --prefix_table--> group_id, step, trajectory_id, turn, num_tokens, value, reward,
                                        num_continuations, utility                              prefixes to continue

A prefix is the first `num_tokens` tokens of its trajectory. Where a group has none, its budget buys rollouts of the
prompt: a row whose trajectory_id, turn and num_tokens are null. TRACE (arXiv 2606.11119), section 4 and appendix E.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files.directory import finished_file
from treepack.rl.trace.allocation import MOST_BUDGET, allocate_prefixes, allocate_roots, prefix_utility, root_utility
from treepack.rl.trace.predictions import Predictions, group_ids, prefix_values
from treepack.rl.trace.targets import anchors, binary_rewards
from treepack.trie.trie import Trie

SUFFIXES = (".jsonl", ".parquet")


def root_table(predictions: Predictions, *, budget: int, most: int | None = None) -> pa.Table:
    """Rollouts of every prompt, by `allocate_roots`, no more than `most` each; prompts by group_id.

    Raises:
        TreepackError: no prompt is predicted, or what `allocate_roots` refuses.
    """
    if not predictions.group_ids:
        raise TreepackError(f"{predictions.path}: predicts no prompt, a line without trajectory_id; predict some")
    maximum = predictions.max_rollouts if most is None else np.minimum(predictions.max_rollouts, most)
    count = allocate_roots(predictions.root_value, budget, maximum=maximum)
    return pa.table(
        {
            "group_id": predictions.group_ids,
            "value": predictions.root_value,
            "num_rollouts": count,
            "utility": root_utility(predictions.root_value, count),
        }
    )


def prefix_table(trie: Trie, predictions: Predictions, *, expand: int, segment: str = "turn") -> tuple[pa.Table, int]:
    """The prefixes of `trie` to continue, by `allocate_prefixes`, and how many there are to choose from.

    A group of m trajectories has m times `expand` continuations. A continuation costs half a rollout, so where a group
    has no prefix its budget buys half as many rollouts of the prompt, rounded down.

    Raises:
        TreepackError: a reward that is not 0 or 1, predictions that do not match the trie, or too large a budget.
    """
    if expand > MOST_BUDGET // trie.num_trajectories:
        raise TreepackError(
            f"{expand:,} continuations for each rollout are more than {MOST_BUDGET:,} in all; give fewer"
        )
    reward = binary_rewards(trie)
    found = anchors(trie, segment=segment)
    value = prefix_values(predictions, trie, found)
    of_anchor = found.group[found.trajectory]
    order = np.argsort(of_anchor, kind="stable")
    budget = np.bincount(found.group) * expand
    count = np.zeros(len(value), np.int64)
    count[order] = allocate_prefixes(value[order], reward[found.trajectory[order]], of_anchor[order], budget)
    utility = prefix_utility(value, reward[found.trajectory], count)

    kept = np.flatnonzero(count)
    at = found.trajectory[kept]
    bare = np.flatnonzero((np.bincount(of_anchor, minlength=len(budget)) == 0) & (budget > 1))
    first = np.unique(found.group, return_index=True)[1][bare]
    table, nulls = trie.trajectories, [None] * len(bare)
    columns: dict[str, list[Any]] = {
        "group_id": [*table["group_id"].take(at).to_pylist(), *(group_ids(trie, found)[g] for g in bare.tolist())],
        "step": table["step"].take(np.concatenate([at, first])).to_pylist(),
        "trajectory_id": table["trajectory_id"].take(at).to_pylist() + nulls,
        "turn": found.turn[kept].tolist() + nulls,
        "num_tokens": found.num_tokens[kept].tolist() + nulls,
        "value": value[kept].tolist() + nulls,
        "reward": reward[at].tolist() + nulls,
        "num_continuations": [*count[kept].tolist(), *(budget[bare] // 2).tolist()],
        "utility": utility[kept].tolist() + nulls,
    }
    return pa.table([pa.array(columns[name], kind) for name, kind in PREFIX_COLUMNS.items()], list(columns)), len(value)


PREFIX_COLUMNS: Mapping[str, pa.DataType] = {
    "group_id": pa.string(),
    "step": pa.int64(),
    "trajectory_id": pa.string(),
    "turn": pa.int64(),
    "num_tokens": pa.int64(),
    "value": pa.float64(),
    "reward": pa.float64(),
    "num_continuations": pa.int64(),
    "utility": pa.float64(),
}


def refuse_name(out: Path) -> None:
    """Raise a TreepackError if the name of `out` does not say in which format to write a table."""
    if out.suffix not in SUFFIXES:
        raise TreepackError(f"{out}: its name must end in {' or '.join(SUFFIXES)}, for that says the format")


def write_table(table: pa.Table, out: Path) -> None:
    """Write `table` as JSON lines or Parquet, as the name of `out` says; whole or not at all.

    Raises:
        TreepackError: the disk fails.
    """
    with finished_file(out) as temporary:
        if out.suffix == ".parquet":
            pq.write_table(table, temporary)
        else:
            pl.DataFrame(table).write_ndjson(temporary)
