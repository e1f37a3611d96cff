"""Models and implementations that cannot run rows in pieces are refused before the first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.packed_gradients import packed
from treepack.carry.refusal import check_carry
from treepack.errors import TreepackError


def test_attention_without_rectangles_is_refused_by_name() -> None:
    loaded = packed("qwen3", "reference")
    check_carry(loaded)
    with pytest.raises(TreepackError, match="flash computes as many queries as keys; give --attention triton or flex"):
        check_carry(replace(loaded, attention="flash"))
