"""Rows that are even in the time of a model: its cost for each token and for each score pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from support import strategies
from support.command_line import Run
from support.refusal import refusal
from support.strategies import make
from treepack.costs.limits import MAX_TOKEN_PAIRS
from treepack.costs.model_cost import ModelShape, pairs_of_token, read_shape
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest
from treepack.pack.options import PackOptions
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.trajectory import Float64, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie


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
