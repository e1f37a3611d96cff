"""Sums of the rewards of every row of a run, from which a step gets its mean reward."""

from __future__ import annotations

import functools
import math

import numpy as np
import pyarrow as pa

from treepack.data.dataset import PackedDataset
from treepack.data.mixture import AnyDataset, sources_of
from treepack.trajectory import Float64


def sum_rewards(dataset: AnyDataset) -> Float64 | None:
    """Return `TrainingRun.rewards`; None if the directory has no rewards."""
    if "trajectory_rewards" not in dataset.term_columns:
        return None
    tables = [
        source.once_per_machine("rewards", functools.partial(_rewards_of_rows, source))
        for source in sources_of(dataset)
    ]
    columns = [np.concatenate([table[name].to_numpy() for table in tables]) for name in ("sum", "count")]
    return np.stack(columns, axis=1)


def _rewards_of_rows(source: PackedDataset) -> pa.Table:
    """Return the sum and the number of the known rewards of every row of a directory."""
    sums = []
    for table in source.tables(["trajectory_rewards"]):
        # [[0.5, None], None, [1.0]] -> (0.5, 1), (0, 0), (1, 1)
        for cell in table["trajectory_rewards"].to_pylist():
            known = [reward for reward in cell or () if reward is not None and not math.isnan(reward)]
            sums.append((math.fsum(known), len(known)))
    values = np.array(sums, np.float64).reshape(-1, 2)
    return pa.table({"sum": values[:, 0], "count": values[:, 1]})
