"""Allocations as tables for a rollout system: the rollouts of each prompt, and the prefixes to continue.

    ValuePredictions --root_table--> group_id, value, num_rollouts, utility                     every prompt
    Trie, ValuePredictions --prefix_table--> group_id, step, trajectory_id, turn, num_tokens, value, reward,
                                        num_continuations, utility                              prefixes to continue

A prefix is the first `num_tokens` tokens of its trajectory. If a group has no prefix, its budget pays for rollouts of
the prompt, in a row whose trajectory_id, turn and num_tokens are null. TRACE (arXiv 2606.11119), section 4 and appendix
E.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files.directory import finished_file
from treepack.files.remote.address import AnyPath
from treepack.research.trace.allocation import (
    MAX_BUDGET,
    allocate_prefixes,
    allocate_roots,
    prefix_utility,
    root_utility,
)
from treepack.research.trace.predictions import ValuePredictions, group_ids, prefix_values
from treepack.research.trace.targets import anchors, binary_rewards
from treepack.trie.trie import Trie

_SUFFIXES = (".jsonl", ".parquet")


def root_table(predictions: ValuePredictions, *, budget: int, max_rollouts: int | None = None) -> pa.Table:
    """Allocate rollouts to every prompt by `allocate_roots`, at most `max_rollouts` each; prompts by group_id.

    Raises:
        TreepackError: no prompt is predicted, or any error of `allocate_roots`.
    """
    if not predictions.group_ids:
        raise TreepackError(f"{predictions.path}: predicts no prompt; add lines without trajectory_id")
    maximum = predictions.max_rollouts
    if max_rollouts is not None:
        maximum = np.minimum(maximum, max_rollouts)
    count = allocate_roots(predictions.root_value, budget, maximum=maximum)
    return pa.table(
        {
            "group_id": predictions.group_ids,
            "value": predictions.root_value,
            "num_rollouts": count,
            "utility": root_utility(predictions.root_value, count),
        }
    )


def prefix_table(
    trie: Trie, predictions: ValuePredictions, *, expand: int, segment: str = "turn"
) -> tuple[pa.Table, int]:
    """Choose the prefixes of `trie` to continue by `allocate_prefixes`. Return them and the number of all prefixes.

    A group of m trajectories gets m times `expand` continuations. A continuation costs half a rollout, so if a group
    has no prefix, its budget pays for half as many rollouts of the prompt, rounded down.

    Raises:
        TreepackError: a reward that is not 0 or 1, predictions that do not match the trie, or too large a budget.
    """
    if expand > MAX_BUDGET // trie.num_trajectories:
        raise TreepackError(
            f"{expand:,} continuations for each rollout are more than {MAX_BUDGET:,} in total; give a smaller --expand"
        )
    reward = binary_rewards(trie)
    prefixes = anchors(trie, segment=segment)
    value = prefix_values(predictions, trie, prefixes)
    # Groups share a trie, so their trajectories may alternate. Sort prefixes by group, and write the counts back: group
    # [0, 1, 0] -> order [0, 2, 1]; the counts [5, 6, 7] in this order -> count [5, 7, 6].
    group = prefixes.group[prefixes.trajectory]
    order = np.argsort(group, kind="stable")
    budget = np.bincount(prefixes.group) * expand
    count = np.zeros(len(value), np.int64)
    count[order] = allocate_prefixes(value[order], reward[prefixes.trajectory[order]], group[order], budget)
    utility = prefix_utility(value, reward[prefixes.trajectory], count)

    chosen = np.flatnonzero(count)
    at = prefixes.trajectory[chosen]
    # Groups of single-turn rollouts. A budget of 1 would pay for half a rollout, so the group gets no row.
    bare = np.flatnonzero((np.bincount(group, minlength=len(budget)) == 0) & (budget > 1))
    first = np.unique(prefixes.group, return_index=True)[1][bare]
    table, nulls = trie.trajectories, [None] * len(bare)
    columns: dict[str, list[Any]] = {
        "group_id": [*table["group_id"].take(at).to_pylist(), *(group_ids(trie, prefixes)[g] for g in bare.tolist())],
        "step": table["step"].take(np.concatenate([at, first])).to_pylist(),
        "trajectory_id": table["trajectory_id"].take(at).to_pylist() + nulls,
        "turn": prefixes.turn[chosen].tolist() + nulls,
        "num_tokens": prefixes.num_tokens[chosen].tolist() + nulls,
        "value": value[chosen].tolist() + nulls,
        "reward": reward[at].tolist() + nulls,
        "num_continuations": [*count[chosen].tolist(), *(budget[bare] // 2).tolist()],
        "utility": utility[chosen].tolist() + nulls,
    }
    return pa.table([pa.array(columns[name], kind) for name, kind in _PREFIX_COLUMNS.items()], list(columns)), len(
        value
    )


# In the order in which tables contain them. Types are explicit because a table may have no rows.
_PREFIX_COLUMNS: Mapping[str, pa.DataType] = {
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


def refuse_name(out: AnyPath) -> None:
    """Check that the name of `out` selects a table format.

    Raises:
        TreepackError: another suffix than .jsonl or .parquet.
    """
    if out.suffix not in _SUFFIXES:
        raise TreepackError(f"{out}: its name must end in {' or '.join(_SUFFIXES)}, which selects the format")


def write_prefix_table(table: pa.Table, out: AnyPath, *, overwrite: bool = False) -> None:
    """Write `table` as JSON lines or Parquet, depending on the name of `out`. A failed write leaves no file.

    With `overwrite` an existing file is replaced.

    Raises:
        TreepackError: the file exists, or the disk fails.
    """
    with finished_file(out, overwrite=overwrite) as temporary:
        if out.suffix == ".parquet":
            pq.write_table(table, temporary)
        else:
            pl.DataFrame(table).write_ndjson(temporary)
