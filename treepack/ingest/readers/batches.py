"""Batches as trainers hold them, columns with one value per row, dealt into rows.

{"prompts": [[5, 6], [5, 7]], "uid": ["a", "b"]}  --rows_of-->  {"prompts": [5, 6], "uid": "a"}, {"prompts": ..}
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treepack.errors import TreepackError


def is_column(value: Any) -> bool:
    """Whether `value` has a list of its own for each row."""
    if isinstance(value, np.ndarray):
        return value.ndim >= 2
    return isinstance(value, list) and len(value) > 0 and all(isinstance(each, list | np.ndarray) for each in value)


def rows_of(columns: dict[str, Any], *, first: str, source: str) -> list[dict[str, Any]]:
    """One dict per row: what is a list is dealt, the rest is of every row; columns that are null are left out.

    Raises:
        TreepackError: a column that is not as long as the column `first`.
    """
    num = len(columns[first])
    dealt = {name: held for name, held in columns.items() if isinstance(held, list | np.ndarray)}
    for name, held in dealt.items():
        if len(held) != num:
            raise TreepackError(f"{source}: {name} has {len(held)} rows, but {first} has {num}; drop the wrong one")
    alike = {name: held for name, held in columns.items() if held is not None and name not in dealt}
    return [alike | {name: held[row] for name, held in dealt.items()} for row in range(num)]
