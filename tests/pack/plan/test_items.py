"""The two halves of a plan: items of trees, and rows of items by their sizes alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.refusal import refusal
from support.strategies import make, trajectories
from treepack.pack.options import METHODS
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.fill import merge_rows
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import ExcessTrajectories, plan_items, plan_rows, refuse_excesses
from treepack.pack.plan.problem import RowLimits
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie


@given(made=trajectories(), room=st.integers(0, 9), method=st.sampled_from(["contiguous", "heuristic", "single-path"]))
def test_the_halves_together_are_the_plan(made: list[Trajectory], room: int, method: str) -> None:
    trie = build_trie(made)
    limits = RowLimits(int(trie.lengths.max()) + room)
    items = plan_items(trie, capacity=limits, method=method)
    rows = merge_rows(items.sizes, items.steps, limits)[items.item_of]
    plan = plan_rows(trie, capacity=limits, method=method)
    pairs = {*zip(rows.tolist(), plan.row_of.tolist(), strict=True)}
    assert len(pairs) == plan.num_rows == len(set(rows.tolist()))
    assert items.tree_bounds.sum() == plan.lower_bound


@given(made=trajectories(), room=st.integers(0, 9), method=st.sampled_from(METHODS))
def test_items_of_any_method_merge_to_a_plan(made: list[Trajectory], room: int, method: str) -> None:
    trie = build_trie(made)
    limits = RowLimits(trie.tokens_flat if method == "groups" else int(trie.lengths.max()) + room)
    items = plan_items(trie, capacity=limits, method=method)
    assert len(items.tree_bounds) == trie.num_trees
    rows = merge_rows(items.sizes, items.steps, limits)[items.item_of]
    if method != "sequence":  # its sizes are those of rows that share, its rows share nothing
        totals = check_plan(trie, Plan(method, limits, rows, int(items.tree_bounds.sum())))
        assert totals.tokens_packed <= items.sizes.tokens.sum()


def test_trajectories_over_a_limit_are_counted_over_all_tries() -> None:
    parts = [
        ExcessTrajectories("tokens", 12, "a", 2),
        ExcessTrajectories("tokens", 20, "b", 1),
        ExcessTrajectories("loss terms", 99, "c", 1),
    ]
    sentence = (
        "trajectory b has 20 tokens, capacity is 10 (3 such in total); raise the capacity: train runs rows "
        "of any length in pieces, so memory is not a reason to drop or truncate trajectories"
    )
    assert refusal(refuse_excesses, parts, RowLimits(10, terms=5)) == sentence


def test_a_item_is_a_row_of_one_tree() -> None:
    trie = build_trie([make(f"t{i}", [i, 1, 2, 3]) for i in range(5)])
    items = plan_items(trie, capacity=100)
    assert items.item_of.tolist() == [0, 1, 2, 3, 4]
    assert items.sizes.tokens.tolist() == items.tree_bounds.tolist() == [4] * 5
