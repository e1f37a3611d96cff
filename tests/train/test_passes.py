"""Passes of a step: every row once, none too long, of about equal cost, and equally many on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.passes import rows_alone
from treepack.errors import TreepackError
from treepack.train.options import check_tokens
from treepack.train.passes import Joining, Pass, deal, plan_passes


def joining_of(tokens: list[int], limit: int, kinds: list[int] | None = None) -> Joining:
    return Joining(limit, np.array(tokens, np.int64), np.array(kinds or [0] * len(tokens), np.int64))


def check_passes(passes: list[Pass], rows: list[int], joining: Joining) -> None:
    assert sorted(row for each in passes for row in each) == sorted(rows)
    for each in passes:
        assert joining.tokens[list(each)].sum() <= joining.limit or len(each) == 1
        assert len(set(joining.kinds[list(each)].tolist())) == 1


@given(
    tokens=st.lists(st.integers(1, 20), min_size=1, max_size=30),
    limit=st.integers(1, 40),
    ranks=st.integers(1, 5),
    data=st.data(),
)
def test_every_row_is_in_one_pass_and_ranks_get_equally_many(
    tokens: list[int], limit: int, ranks: int, data: st.DataObject
) -> None:
    count = len(tokens)
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=40))
    joining, costs = joining_of(tokens, limit, kinds), np.array(tokens, float)
    check_passes(plan_passes(rows, costs, joining, ranks=ranks), rows, joining)
    shares = deal(rows, costs, ranks, joining)
    check_passes([each for share in shares for each in share if each], rows, joining)
    assert len({len(share) for share in shares}) == 1
    # Padding on some rank, if there are rows enough to avoid it, is only left if joined rows do not fit apart.
    alone = deal(rows, costs, ranks, rows_alone(count))
    assert len(shares[0]) <= len(alone[0])


def test_passes_have_about_equal_cost() -> None:
    joining = joining_of([6, 4, 4, 3, 3, 2], 10)
    passes = plan_passes(range(6), joining.tokens.astype(float), joining)
    assert sorted(joining.tokens[list(each)].sum() for each in passes) == [7, 7, 8]


@pytest.mark.parametrize("size", [1, 3])
def test_many_rows_are_planned_in_moderate_time(size: int) -> None:
    tokens = np.random.default_rng(0).integers(100, 8192, 5000)
    joining = Joining(32_768, tokens, np.zeros(5000, np.int64))
    passes = plan_passes(range(5000), tokens.astype(float), joining, ranks=size)
    check_passes(passes, [*range(5000)], joining)
    assert len(passes) <= 1.02 * tokens.sum() / 32_768 + size


@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
def test_another_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(TreepackError, match=r"^pass_tokens is .*; expected a number of tokens of at least 1, or auto$"):
        check_tokens(None, value)
