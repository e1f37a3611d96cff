"""The example that shows the idea in one file: it stays short, needs torch and numpy alone, and is exact."""

from __future__ import annotations

import ast
from typing import Any

import nanotree
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROOT
from support.strategies import make
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.trie.builders.in_memory import build_trie

Array = np.ndarray[Any, Any]

SOURCE = (ROOT / "examples" / "nanotree.py").read_text()
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def test_the_file_is_short_and_imports_torch_and_numpy_alone() -> None:
    assert len(SOURCE.splitlines()) <= 200
    imported = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported == {"__future__", "dataclasses", "numpy", "torch"}


@pytest.mark.parametrize("seed", range(3))
def test_the_gradients_of_a_row_are_those_of_each_rollout_alone(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 < nanotree.main(seed) < 1e-12
    assert "14 rollouts" in capsys.readouterr().out


def test_a_row_without_its_mask_has_other_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(row: nanotree.Row) -> torch.Tensor:
        return torch.ones(len(row.tokens), len(row.tokens), dtype=torch.bool).tril()

    monkeypatch.setattr(nanotree, "visible", causal)
    assert nanotree.main() > 1e-3


def test_the_row_of_the_header_is_the_one_that_is_made() -> None:
    row = nanotree.make_row(
        [nanotree.Rollout([7, 8, 3, 4], [0, 0, 1, 1]), nanotree.Rollout([7, 8, 1, 2], [0, 0, 1, 1])]
    )
    columns = (row.tokens, row.subtree_end, row.parent, row.position)
    shown = [" ".join(f"{value:2}" for value in column) for column in columns]
    names = ("one row", "subtree_end", "parent", "position")
    assert [line in SOURCE for line in shown] == [True] * len(names), shown
    assert row.weight.tolist() == [0, 0, 1, 1, 1, 1]


@given(SEQUENCES)
def test_its_row_is_the_row_of_the_library(sequences: list[list[int]]) -> None:
    # The library trains no first token of a rollout, because nothing predicts it.
    row = nanotree.make_row([nanotree.Rollout(tokens, [0.0] + [1.0] * (len(tokens) - 1)) for tokens in sequences])
    trie = build_trie([make(str(number), tokens) for number, tokens in enumerate(sequences)])
    (own,) = pack_rows(trie, plan_rows(trie, capacity=1000))
    columns = (own.input_ids, own.parent, own.subtree_end, own.position_ids, own.loss_weight)
    assert trees(*columns) == trees(row.tokens, row.parent, row.subtree_end, row.position, row.weight)


def trees(tokens: Array, parent: Array, subtree_end: Array, *others: Array) -> list[tuple[float, ...]]:
    """Return the columns of each tree, sorted, because their order in a row is free; indices become distances."""
    index = np.arange(len(tokens))
    columns = (tokens, np.where(parent < 0, 0, index - parent), subtree_end - index, *others)
    cuts = [(int(root), int(subtree_end[root])) for root in np.flatnonzero(parent < 0)]
    return sorted(tuple(np.concatenate([column[a:b] for column in columns]).tolist()) for a, b in cuts)
