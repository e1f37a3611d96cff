"""The sampler's temperatures of all terms of a packed directory, read from one column."""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
from pyarrow import compute

from treepack.data.dataset import PackedDataset


def temperature_range(dataset: PackedDataset) -> tuple[float, float, int] | None:
    """Return the minimum and the maximum temperature of the terms, and the number of terms without one.

    The temperatures are float32 values; NaN if no term has one. None if the directory has no temperatures.
    """
    if "term_temperature" not in dataset.term_columns:
        return None
    table = dataset.once_per_machine("temperatures", functools.partial(_read_range, dataset))
    low, high, missing = (table[name][0].as_py() for name in ("low", "high", "missing"))
    return low, high, missing


def _read_range(dataset: PackedDataset) -> pa.Table:
    """Return one row: the columns `low`, `high` and `missing` of `temperature_range`."""
    low, high, missing = np.inf, -np.inf, 0
    for table in dataset.tables(["term_temperature"]):
        # [[.7, NaN], [null]] -> [.7, NaN, NaN]
        values = compute.list_flatten(table["term_temperature"]).to_numpy().astype(np.float64)
        known = values[~np.isnan(values)]
        missing += len(values) - len(known)
        low, high = min(low, known.min(initial=np.inf)), max(high, known.max(initial=-np.inf))
    low, high = (float(low), float(high)) if low <= high else (np.nan, np.nan)
    return pa.table({"low": np.array([low]), "high": np.array([high]), "missing": np.array([missing], np.int64)})
