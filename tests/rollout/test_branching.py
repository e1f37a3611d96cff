"""The forks of a level and of a fallback keep their budget, for any tree."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusal import refusal
from support.tree_estimates import PROMPT, grow, log_normal_law, two_speeds
from treepack.rollout.branching import divide, fallback_forks, level_forks
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import BRANCHING, TreeOptions
from treepack.rollout.simulated import LengthLaw, SimulatedEngine
from treepack.rollout.tree import FINISHED_WELL, TreeNode
from treepack.trajectory import Float32

shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=12).map(lambda parts: np.array(parts) / sum(parts))


def path(logprob: float | None) -> TreeNode:
    """An active path whose last segment has two tokens of this log-probability."""
    logprobs: Float32 | None = None if logprob is None else np.full(2, logprob, np.float32)
    return TreeNode(None, 0, 0, np.array([1, 2], np.int32), SingleTurn(), logprobs=logprobs)


def forks(logprobs: list[float], options: TreeOptions, *, level: int = 1, first: int = 2, leaves: int = 0) -> list[int]:
    rng = np.random.default_rng(0)
    active = [path(value) for value in logprobs]
    counts = level_forks(active, level=level, first=first, num_leaves=leaves, options=options, rng=rng)
    return [int(count) for count in counts]


@given(st.integers(0, 100), shares, st.integers(0, 2**32))
def test_a_divided_total_is_complete_and_each_part_is_its_share_rounded(
    total: int, shares: np.ndarray, seed: int
) -> None:
    parts = divide(total, shares, np.random.default_rng(seed))
    assert parts.sum() == total
    for part, share in zip(parts.tolist(), shares.tolist(), strict=True):
        assert math.floor(total * share - 1e-8) <= part <= math.ceil(total * share + 1e-8)


def test_equal_remainders_are_drawn_evenly() -> None:
    rng = np.random.default_rng(0)
    parts = np.array([divide(4, np.full(3, 1 / 3), rng) for _ in range(900)])
    assert np.abs(parts.mean(axis=0) - 4 / 3).max() < 3 * math.sqrt(2 / 9 / 900)


@given(
    st.lists(st.floats(-9, 0), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 20),
    st.sampled_from(BRANCHING),
)
def test_a_level_divides_its_budget_and_never_exceeds_the_width(
    logprobs: list[float], level: int, first: int, branches: int, leaves: int, branching: str
) -> None:
    width = leaves + len(logprobs) + 3
    options = TreeOptions(width=width, branches=branches, branching=branching, depth=None)
    counts = forks(logprobs, options, level=level, first=first, leaves=leaves)
    assert min(counts) >= 1
    assert sum(counts) == max(len(counts), min(width - leaves, first * branches**level))
    if branching == "even":
        assert max(counts) - min(counts) <= 1


def test_likely_paths_or_unlikely_paths_have_more_forks_than_others() -> None:
    options = TreeOptions(width=16, branching_temperature=(0.5, 0.5), branching="likely", depth=None)
    likely = forks([-0.1, -1.0, -2.0], options, level=3)
    assert likely[0] > likely[1] > likely[2] == 1
    unlikely = forks([-0.1, -1.0, -2.0], replace(options, branching="unlikely"), level=3)
    assert unlikely[0] == 1 < unlikely[1] < unlikely[2]


def test_the_branching_temperature_changes_linearly_from_the_first_to_the_last_level_with_forks() -> None:
    # exp(1 / T) for paths whose log-probabilities differ by 1: at depth 6, forks are at the levels 1 to 5.
    options = TreeOptions(
        width=10**6, first_forks=10**6, branching="likely", branching_temperature=(1.0, 0.2), depth=6, branches=1
    )
    for level, temperature in ((1, 1.0), (3, 0.6), (5, 0.2), (9, 0.2)):
        a, b = forks([-1.0, -2.0], options, level=level, first=10**6)
        assert math.log((a - 1) / (b - 1)) == pytest.approx(1 / temperature, abs=0.01)


def test_branching_by_log_probabilities_is_refused_for_an_engine_without_them() -> None:
    rng = np.random.default_rng(0)
    options = TreeOptions(branching="likely")
    assert "no log-probabilities to branch by; use --branching even" in refusal(
        level_forks, [path(None)], level=1, first=2, num_leaves=0, options=options, rng=rng
    )


@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 5), st.sampled_from([20, 64]))
def test_a_fallback_forks_at_segment_boundaries_of_well_finished_paths_until_the_width(
    seed: int, missing: int, branches: int, longest: int
) -> None:
    small = TreeOptions(width=4, max_tokens=longest, segment=5, depth=None, fallback="none")
    (tree,) = grow(SimulatedEngine(two_speeds()), small, seed=seed)
    leaves = list(tree.leaves)
    options = TreeOptions(width=len(leaves) + missing, branches=branches)
    chosen = fallback_forks(leaves, options=options, rng=np.random.default_rng(seed))
    well = [leaf for leaf in leaves if leaf.finish in FINISHED_WELL] or leaves
    assert sum(chosen.values()) == missing
    assert set(chosen) <= {node for leaf in well for node in leaf.path()[:-1]}


def test_a_fallback_takes_each_boundary_of_a_path_equally_often() -> None:
    (tree,) = grow(
        SimulatedEngine(log_normal_law()[0]), TreeOptions(width=1, segment=4, depth=4, max_tokens=16, fallback="none")
    )
    options = TreeOptions(width=3001, branches=1)
    chosen = fallback_forks(list(tree.leaves), options=options, rng=np.random.default_rng(0))
    counts = np.array(list(chosen.values()))
    assert len(counts) == 4
    assert np.abs(counts / 3000 - 1 / 4).max() < 3 * math.sqrt(3 / 16 / 3000)


def fixed_length(*lengths: int) -> LengthLaw:
    """Responses of these lengths, all equally likely."""
    probability = np.bincount(lengths) / len(lengths)
    return LengthLaw(probability, num_prompt=len(PROMPT))


@pytest.mark.parametrize(("first", "branches"), [(2, 2), (3, 2), (1, 4), (5, 1)])
def test_a_tree_without_early_ends_has_the_papers_budget_at_every_level(first: int, branches: int) -> None:
    options = TreeOptions(
        width=16, segment=8, depth=None, max_tokens=64, first_forks=first, branches=branches, fallback="none"
    )
    (tree,) = grow(SimulatedEngine(fixed_length(64)), options)
    at_depth = np.bincount([node.depth for node in tree.nodes()])
    assert at_depth.tolist() == [1] + [min(16, first * branches**level) for level in range(8)]
