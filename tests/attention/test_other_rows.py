"""Schedules and windows of other rows are refused, because they would give wrong gradients without an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.refusal import refusal
from support.tiny_families import tiny_family
from treepack.attention import BatchSchedules, register, tree_attention
from treepack.errors import TreepackError

# 0 - 1 - 2 - 3 - 4 with the branch 5 - 6 after token 1, and rows of other shapes and values
END = torch.tensor([[7, 7, 5, 5, 5, 7, 7]])
OTHERS = {
    "values": torch.tensor([[7, 7, 7, 4, 7, 7, 7]]),
    "length": torch.tensor([[8, 8, 5, 5, 5, 8, 8, 8]]),
    "number": END.repeat(2, 1),
}
ROW = {
    "input_ids": torch.tensor([[7, 3, 9, 11, 2, 5, 6]]),
    "position_ids": torch.tensor([[0, 1, 2, 3, 4, 2, 3]]),
    "subtree_end": END,
    "use_cache": False,
}


@torch.no_grad()
@pytest.mark.parametrize("impl", ["reference", "flex"])
def test_schedules_of_other_rows_are_refused(impl: str) -> None:
    register()
    windows: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_family("gemma3_text", attention=f"treepack_{impl}", **windows)
    expected = model(**ROW).logits
    assert torch.equal(model(**ROW, schedule=BatchSchedules(END.clone())).logits, expected)
    for other in OTHERS.values():
        with pytest.raises(
            TreepackError, match=r"made for 1 other rows of \d tokens; pass Schedules|start is \[2, 7\]"
        ):
            model(**ROW, schedule=BatchSchedules(other))


def test_windows_of_other_rows_are_refused() -> None:
    q = torch.randn(1, 2, 7, 4)
    assert "start is [1, 8] and subtree_end is [1, 7]; pass first_visible" in refusal(
        tree_attention, q, q, q, END, start=torch.zeros(1, 8, dtype=torch.int32)
    )
