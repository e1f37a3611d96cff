"""`--method groups`: every group is whole in one row, with all limits, so dpo has all of its pairs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import strategies
from support.command_line import Run
from support.refusal import refusal
from support.strategies import make
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.planning import plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie


def groups_of(trie: Trie) -> list[tuple[int, str]]:
    names = trie.trajectories["group_id"].to_pylist()
    return list(zip(trie.step_rank.tolist(), names, strict=True))


@given(trajectories=strategies.trajectories(), capacity=st.integers(60, 90))
def test_a_group_lies_in_one_row_and_rows_keep_the_limits(trajectories: list[Trajectory], capacity: int) -> None:
    trie = build_trie(trajectories)
    plan = plan_rows(trie, capacity=capacity, method="groups")
    totals = check_plan(trie, plan)
    assert totals.row_tokens.max() <= capacity
    assert totals.tokens_packed >= plan.lower_bound > 0
    rows = {(group, row) for group, row in zip(groups_of(trie), plan.row_of.tolist(), strict=True)}
    assert len(rows) == len(set(groups_of(trie)))


def pairs(count: int) -> list[Trajectory]:
    """Groups of two, one good and one bad, whose prompts begin alike."""
    return [
        make(f"t{i}", [9, 9, i // 2, 20 + i % 2, 21, 22], group=f"g{i // 2}", reward=float(i % 2)) for i in range(count)
    ]


def test_groups_that_fit_together_share_a_row() -> None:
    trie = build_trie(pairs(8))
    # A group is [9, 9, i], then 20 21 22 and 21 21 22: 3 + 3 + 3 = 9 tokens, so two groups fill a row of 18 or less.
    plan = plan_rows(trie, capacity=18, method="groups")
    assert sorted(Counter(plan.row_of.tolist()).values()) == [4, 4]


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (RowLimits(8), "group g0 has 9 tokens and the capacity is 8 (4 such groups)"),
        (RowLimits(20, pairs=35), "score pairs and the budget of pairs is 35"),
        (RowLimits(20, terms=9), "group g0 has 10 loss terms and the budget of terms is 9"),
    ],
)
def test_a_group_that_does_not_fit_is_named(limits: RowLimits, sentence: str) -> None:
    assert sentence in refusal(plan_rows, build_trie(pairs(8)), capacity=limits, method="groups")


def test_even_rows_of_whole_groups_are_refused() -> None:
    assert "but the method groups keeps each group in one row" in refusal(
        plan_rows, build_trie(pairs(8)), capacity=20, method="groups", multiple_of=2
    )


def test_dpo_takes_what_other_methods_split(treepack: Run, tmp_path: Path) -> None:
    from support.oracle_model import tiny_config

    lines = [
        f'{{"id": "t{i}", "group": "g{i % 4}", "reward": {i // 4}, "tokens": [9, {i % 4}, {20 + i // 4}, 21, 22, 23], '
        f'"loss_mask": [0, 0, 1, 1, 1, 1]}}'
        for i in range(8)
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    config = tiny_config(tmp_path / "tiny.json")
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie").status == 0
    for method in ("sequence", "groups"):
        packed, scored = tmp_path / method, tmp_path / f"{method}-ref"
        result = treepack("pack", tmp_path / "trie", "--capacity", 11, "--method", method, "--out", packed)
        assert result.status == 0, result.err
        options = ("--model", config, "--device", "cpu")
        assert treepack("logprobs", packed, *options, "--column", "ref", "--out", scored).status == 0
        trained = treepack(
            "train", scored, *options, "--loss", "dpo", "--steps", 1, "--out", tmp_path / f"{method}-out"
        )
        if method == "groups":
            assert trained.status == 0, trained.err
        else:
            assert trained.status == 1
            assert "pack with --method groups" in trained.err
