"""Split batches of trainers, columns with one value per row, into rows.

{"prompts": [[5, 6], [5, 7]], "uid": ["a", "b"]}  --rows_of-->  {"prompts": [5, 6], "uid": "a"}, {"prompts": ..}
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treepack.errors import TreepackError


def is_column(value: Any) -> bool:
    """Return True if `value` has a list for each row."""
    # [[5, 6], [7]] and an array of shape [rows, length] are columns; [5, 6], which may be one rollout, is not.
    if isinstance(value, np.ndarray):
        return value.ndim >= 2
    return isinstance(value, list) and len(value) > 0 and all(isinstance(each, list | np.ndarray) for each in value)


def rows_of(columns: dict[str, Any], *, first: str, source: str) -> list[dict[str, Any]]:
    """Return one dict per row. A list has one value per row, any other value belongs to every row, null is left out.

    Raises:
        TreepackError: a column is not as long as the column `first`.
    """
    num_rows = len(columns[first])
    lists = {name: column for name, column in columns.items() if isinstance(column, list | np.ndarray)}
    for name, column in lists.items():
        if len(column) != num_rows:
            raise TreepackError(
                f"{source}: {name} has {len(column)} rows, but {first} has {num_rows}; drop the wrong column"
            )
    # {"ids": [[5], [6]], "step": 3, "uid": None} -> {"step": 3, "ids": [5]}, {"step": 3, "ids": [6]}
    shared = {name: value for name, value in columns.items() if value is not None and name not in lists}
    return [shared | {name: column[row] for name, column in lists.items()} for row in range(num_rows)]
