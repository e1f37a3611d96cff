"""Merged and even rows, of tokens or of time: within limits, nothing lost or repeated, and no more rows than needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support import oracle, strategies
from support.command_line import Run
from support.refusal import refusal
from support.strategies import make, trajectories
from treepack.costs.limits import MAX_TOKEN_PAIRS
from treepack.costs.model_cost import ModelShape, pairs_of_token, read_shape
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest
from treepack.pack.options import METHODS, PackOptions
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.fill import merge_rows
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import ExcessTrajectories, plan_items, plan_rows, refuse_excesses
from treepack.pack.plan.problem import RowLimits, path_pairs
from treepack.pack.plan.unions import RowSizes, row_sizes
from treepack.trajectory import Float64, Int64, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.shared_prefixes import range_minima
from treepack.trie.trie import Trie, sequences_of


def items_of(tokens: list[int]) -> RowSizes:
    values = np.array(tokens, np.int64)
    return RowSizes(values, path_pairs(values), values // 2)


def merged(tokens: list[int], limits: RowLimits) -> Int64:
    return merge_rows(items_of(tokens), np.zeros(len(tokens), np.int64), limits)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=70), st.data())
def test_range_minima_are_minima_of_ranges(values: list[int], data: st.DataObject) -> None:
    start = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=9))
    stop = [data.draw(st.integers(a + 1, len(values))) for a in start]
    minima = range_minima(np.array(values), np.array(start, np.int64), np.array(stop, np.int64))
    assert minima.tolist() == [min(values[a:b]) for a, b in zip(start, stop, strict=True)]


@given(trajectories=strategies.trajectories(), data=st.data())
def test_sizes_of_any_rows_are_those_of_unions(trajectories: list[Trajectory], data: st.DataObject) -> None:
    trie = build_trie(trajectories)
    row_of = np.array([data.draw(st.integers(0, 3)) for _ in trajectories])
    sizes = row_sizes(trie, row_of, 4)
    paths, trees = [tokens.tolist() for tokens in sequences_of(trie)], trie.tree_id[trie.end_node].tolist()
    by_id = {t.trajectory_id: t.content for t in trajectories}
    names = trie.trajectories["trajectory_id"].to_pylist()
    for row in range(4):
        members = np.flatnonzero(row_of == row).tolist()
        # A token is its tree and the path up to it, so trajectories [1, 2] and [1, 3] of one tree have 3 tokens.
        union = {(trees[i], *paths[i][:n]) for i in members for n in range(1, len(paths[i]) + 1)}
        contents = [content for i in members if isinstance(content := by_id[names[i]], Tokens)]
        assert sizes.tokens[row] == len(union)
        assert sizes.pairs[row] == sum(len(path) - 1 for path in union)
        assert sizes.terms[row] == sum(content.num_trained for content in contents)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(30, 50))
def test_merging_never_needs_more_rows_than_best_fit_decreasing(tokens: list[int], capacity: int) -> None:
    row_of = merged(tokens, RowLimits(capacity))
    assert np.bincount(row_of, tokens).max() <= capacity
    assert np.bincount(row_of).min() > 0
    assert row_of.max() + 1 <= oracle.best_fit_decreasing(tokens, capacity)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(30, 50),
    st.none() | st.integers(465, 900),
    st.none() | st.integers(15, 40),
)
def test_no_limit_is_exceeded(tokens: list[int], capacity: int, pairs: int | None, terms: int | None) -> None:
    items, row_of = items_of(tokens), merged(tokens, RowLimits(capacity, pairs, terms))
    for values, limit in ((items.tokens, capacity), (items.pairs, pairs), (items.terms, terms)):
        assert limit is None or np.bincount(row_of, values).max() <= limit
    assert np.bincount(row_of).min() > 0


def test_rows_are_filled_where_best_fit_leaves_gaps() -> None:
    # Best fit decreasing makes 46 + 35 + 19, 35 + 32 + 32 and two more rows; three rows of exactly 100 are enough.
    tokens = [46, 35, 35, 32, 32, 33, 33, 19, 35]
    assert sum(tokens) == 300
    assert oracle.best_fit_decreasing(tokens, 100) == 4
    assert merged(tokens, RowLimits(100)).max() + 1 == 3


@pytest.mark.parametrize("seed", range(3))
def test_small_trees_fill_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(50, 2000, 2000).tolist()
    rows = merged(tokens, RowLimits(8192)).max() + 1
    assert sum(tokens) / (rows * 8192) > 0.99


def by_steps(sizes: list[int]) -> Trie:
    """Steps of `sizes[s]` trajectories that share two tokens and have 3 to 9."""
    trajectories = [
        make(f"t{s}-{i}", [7, 7, *[i] * (1 + i % 7)], step=s) for s, size in enumerate(sizes) for i in range(size)
    ]
    return build_trie(trajectories)


@given(
    trajectories=strategies.trajectories(max_count=12),
    capacity=st.integers(9, 24),
    multiple_of=st.integers(1, 4),
    pairs=st.none() | st.integers(45, 90),
    terms=st.none() | st.integers(8, 20),
)
def test_every_step_has_a_multiple_of_rows_within_all_limits(
    trajectories: list[Trajectory], capacity: int, multiple_of: int, pairs: int | None, terms: int | None
) -> None:
    trie = build_trie(trajectories)
    limits = RowLimits(capacity, pairs, terms)
    try:
        plan = plan_rows(trie, capacity=limits, multiple_of=multiple_of)
    except TreepackError as error:
        assume("too few for" not in str(error))
        raise
    check_plan(trie, plan)
    for step in range(int(trie.step_rank.max()) + 1):
        assert len(np.unique(plan.row_of[trie.step_rank == step])) % multiple_of == 0


def test_merged_rows_come_apart_before_any_is_split() -> None:
    trie = build_trie([make(f"t{i}", [i] * 4) for i in range(8)])
    assert plan_rows(trie, capacity=16).num_rows == 2
    plan = plan_rows(trie, capacity=16, multiple_of=4)
    assert (plan.num_rows, check_plan(trie, plan).tokens_packed) == (4, trie.tokens_tree)


def test_rows_are_split_where_it_repeats_the_fewest_tokens() -> None:
    paths = [[1, 1, 1, 1, 2], [1, 1, 1, 1, 3], [1, 4, 4, 4], [1, 4, 4, 5]]
    trie = build_trie([make(f"t{i}", path) for i, path in enumerate(paths)])
    plan = plan_rows(trie, capacity=20, multiple_of=2)
    rows = dict(zip(trie.trajectories["trajectory_id"].to_pylist(), plan.row_of.tolist(), strict=True))
    assert rows["t0"] == rows["t1"] != rows["t2"] == rows["t3"]
    assert check_plan(trie, plan).tokens_packed == trie.tokens_tree + 1


def test_a_step_of_too_few_trajectories_is_one_sentence() -> None:
    with pytest.raises(TreepackError, match=r"training step 1 has 3 trajectories, too few for 4 rows.*1 such steps"):
        plan_rows(by_steps([4, 3]), capacity=20, multiple_of=4)


@pytest.mark.parametrize("multiple_of", [8, 16])
def test_rows_come_out_even(multiple_of: int) -> None:
    rng = np.random.default_rng(0)
    trie = build_trie([make(f"t{i}", [i, *range(int(rng.integers(5, 60)))]) for i in range(400)])
    pairs = check_plan(trie, plan_rows(trie, capacity=256, multiple_of=multiple_of)).row_pairs
    plain = check_plan(trie, plan_rows(trie, capacity=256)).row_pairs
    assert pairs.max() / pairs.mean() < 1.1 < plain.max() / plain.mean()


@pytest.mark.parametrize(("pairs", "terms"), [(20, None), (None, 4)])
def test_the_checker_and_the_planner_refuse_what_exceeds_budgets(pairs: int | None, terms: int | None) -> None:
    trie = build_trie([make("a", [1, 2, 3, 4]), make("b", [1, 2, 5, 6]), make("c", [9, 9, 9])])
    over = "score pairs, over the budget of pairs, 20" if pairs else "loss terms, over the budget of terms, 4"
    with pytest.raises(TreepackError, match=f"row 0 of the plan has .* {over}"):
        check_plan(trie, Plan("mine", RowLimits(20, pairs, terms), np.zeros(3, np.int64)))
    with pytest.raises(TreepackError, match=r"trajectory \w has .* \(2 such in total\)"):
        plan_rows(trie, capacity=RowLimits(20, pairs and 9, terms and 2))


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


def costs_of(trie: Trie, plan: Plan, token_pairs: int) -> Float64:
    totals = check_plan(trie, plan)
    return np.asarray(totals.row_pairs + token_pairs * totals.row_tokens, np.float64)


@given(
    trajectories=strategies.trajectories(max_count=12),
    capacity=st.integers(9, 24),
    multiple_of=st.integers(2, 3),
    token_pairs=st.integers(0, 50),
    pairs=st.none() | st.integers(45, 90),
)
def test_rows_are_within_limits_and_the_most_expensive_of_a_step_come_first(
    trajectories: list[Trajectory], capacity: int, multiple_of: int, token_pairs: int, pairs: int | None
) -> None:
    trie = build_trie(trajectories)
    limits = RowLimits(capacity, pairs)
    try:
        plan = plan_rows(trie, capacity=limits, multiple_of=multiple_of, token_pairs=token_pairs)
    except TreepackError as error:
        assume("too few for" not in str(error))
        raise
    costs = costs_of(trie, plan, token_pairs)
    steps = np.zeros(plan.num_rows, np.int64)
    steps[plan.row_of] = trie.step_rank
    assert (np.bincount(steps) % multiple_of == 0).all()
    assert (np.diff(costs)[np.diff(steps) == 0] <= 0).all()


def test_rows_of_long_and_of_short_paths_are_even_in_the_time_of_a_model() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(5, 20, 300), rng.integers(100, 200, 40)])
    trie = build_trie([make(f"t{i}", [i, *range(int(length))]) for i, length in enumerate(lengths)])
    ratio = 500  # a token costs as much as 500 pairs, and sees 200 tokens at most
    even, by_pairs = (
        costs_of(trie, plan_rows(trie, capacity=512, multiple_of=8, token_pairs=each), ratio) for each in (ratio, 0)
    )
    assert even.max() / even.mean() < 1.05 < by_pairs.max() / by_pairs.mean()


def test_a_token_of_a_hybrid_is_worth_more_pairs_than_one_of_a_dense_model() -> None:
    dense, hybrid = (read_shape(name) for name in ("qwen3-4b", "qwen3.5-4b"))
    assert pairs_of_token(dense) == round(dense.weights / dense.scores)
    # About as many weights, and 8 layers with scores instead of 36.
    assert pairs_of_token(hybrid) > 4 * pairs_of_token(dense)


def test_a_layer_with_a_window_costs_its_window_for_each_token() -> None:
    shape = ModelShape("m", weights=600, output=0, scores=4, windows=((100, 2),))
    assert pairs_of_token(shape) == 200  # (600 + 100 * 2) / 4
    assert pairs_of_token(ModelShape("m", weights=600, output=0, scores=0, windows=((100, 2),))) == MAX_TOKEN_PAIRS


def test_the_command_records_the_number_and_the_wait(treepack: Run, tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    lines = [f'{{"id": "{i}", "tokens": {[*range(3 + i)]}, "mask": {[0] + [1] * (2 + i)}}}' for i in range(8)]
    rollouts.write_text("\n".join(lines))
    trie, packed, plain = (tmp_path / name for name in ("trie", "packed", "plain"))
    assert treepack("build-trie", rollouts, "--out", trie).status == 0
    options = ("--capacity", 40, "--balance", 2)
    result = treepack("pack", trie, "--out", packed, *options, "--model", "qwen3.5-4b")
    assert result.status == 0
    assert "group_cost_max_over_mean" in result.out
    assert read_manifest(packed)["options"]["token_pairs"] == pairs_of_token(read_shape("qwen3.5-4b"))
    assert treepack("pack", trie, "--out", plain, *options).status == 0
    assert "token_pairs" not in read_manifest(plain)["options"]


def test_wrong_models_and_costs_are_refused(treepack: Run, tmp_path: Path) -> None:
    unknown = treepack("pack", tmp_path, "--out", tmp_path / "out", "--balance", 2, "--model", "qwen3-7b")
    assert unknown.status == 1
    assert "qwen3-7b: no such config.json" in unknown.err
    assert "give --balance too" in refusal(PackOptions, token_pairs=10)
    assert "token_pairs is -1; expected 0 to" in refusal(PackOptions, balance=2, token_pairs=-1)
