"""Leaf weights are the products of 1 / forks, and weighted estimates are those of independent rollouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tree_estimates import (
    START,
    before_fallback,
    estimate,
    exact_values,
    grow,
    length,
    log_normal_law,
    mean_and_error,
    plain,
    split_evenly,
    success,
    two_speeds,
    weighted,
)
from treepack.rollout.options import BRANCHING, FALLBACK, TreeOptions, independent
from treepack.rollout.simulated import SimulatedEngine
from treepack.rollout.tree import Tree, mean_decoded, weights_of_leaves
from treepack.trajectory import Float64

LONGEST = 48
NO_FALLBACK = TreeOptions(width=8, segment=6, depth=None, max_tokens=LONGEST, max_repeats=0, fallback="none")
OPTIONS = replace(NO_FALLBACK, fallback="random")
MEAN_LENGTH, PASS_RATE = exact_values(two_speeds(), longest=LONGEST)


@given(
    st.builds(
        TreeOptions,
        width=st.integers(1, 20),
        max_tokens=st.integers(1, 60),
        segment=st.integers(1, 20),
        depth=st.none() | st.integers(1, 8),
        first_forks=st.integers(1, 8) | st.just((2, 8)),
        branches=st.integers(1, 3),
        branching=st.sampled_from(BRANCHING),
        fallback=st.sampled_from(FALLBACK),
    ),
    st.integers(0, 10**9),
)
def test_weights_of_any_tree_are_an_even_split_at_every_fork_and_sum_to_1(options: TreeOptions, seed: int) -> None:
    (tree,) = grow(SimulatedEngine(two_speeds()), options, seed=seed)
    weights, before = weights_of_leaves(tree)
    everywhere = split_evenly(tree.root)
    assert weights.tolist() == pytest.approx([everywhere[leaf] for leaf in tree.leaves], rel=1e-12)
    without = split_evenly(tree.root, fallback=False)
    assert before.tolist() == pytest.approx([without.get(leaf, 0.0) for leaf in tree.leaves], rel=1e-12)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert before.sum() == pytest.approx(1, abs=1e-12)
    if options.fallback == "none":
        assert (weights == before).all()


def test_weights_before_a_fallback_are_those_of_the_tree_without_one() -> None:
    engine = SimulatedEngine(two_speeds())
    for small, full in zip(grow(engine, NO_FALLBACK, 10), grow(engine, OPTIONS, 10), strict=True):
        before = weights_of_leaves(full)[1]
        assert before[: len(small.leaves)].tolist() == weights_of_leaves(small)[0].tolist()
        assert not before[len(small.leaves) :].any()


def test_independent_rollouts_have_equal_weights() -> None:
    (tree,) = grow(SimulatedEngine(two_speeds()), independent(width=5, max_tokens=30))
    assert weights_of_leaves(tree)[0].tolist() == pytest.approx([1 / 5] * 5)


def test_without_a_fallback_weighted_estimates_are_unbiased_and_plain_means_are_not() -> None:
    trees = grow(SimulatedEngine(two_speeds()), NO_FALLBACK, 220)
    for value, truth in ((length, MEAN_LENGTH), (success, PASS_RATE)):
        assert estimate(trees, value, weighted).distance(truth) < 3
        assert estimate(trees, value, plain).distance(truth) > 3
    assert estimate(trees, length, plain).mean > MEAN_LENGTH * 1.3
    assert estimate(trees, success, plain).mean < PASS_RATE * 0.85


def test_with_a_fallback_the_leaves_before_it_are_unbiased_and_all_weights_leave_a_rest() -> None:
    trees = grow(SimulatedEngine(two_speeds()), OPTIONS, 220)
    for value, truth in ((length, MEAN_LENGTH), (success, PASS_RATE)):
        assert estimate(trees, value, before_fallback).distance(truth) < 3
        assert estimate(trees, value, plain).distance(truth) > 6
        rest = abs(estimate(trees, value, weighted).mean - truth)
        assert 0 < rest < abs(estimate(trees, value, plain).mean - truth)
    assert estimate(trees, length, weighted).distance(MEAN_LENGTH) > 3


def test_the_mean_of_an_independent_rollout_is_estimated_from_a_tree() -> None:
    trees = grow(SimulatedEngine(two_speeds()), OPTIONS, 40, seed=1)
    assert [mean_decoded(tree) for tree in trees] == pytest.approx(
        [float(np.array([length(leaf) for leaf in tree.leaves]) @ weights_of_leaves(tree)[1]) for tree in trees]
    )
    assert mean_and_error(map(mean_decoded, trees)).distance(MEAN_LENGTH) < 3


@pytest.mark.slow
@pytest.mark.parametrize(("branching", "first_forks"), [("likely", 2), ("unlikely", (2, 8)), ("even", (2, 8))])
def test_weighted_estimates_are_unbiased_for_every_way_to_branch(
    branching: str, first_forks: int | tuple[int, int]
) -> None:
    """A low temperature gives nearly all forks to one path; trees with a fallback contain those without one."""
    options = replace(OPTIONS, branching=branching, branching_temperature=(0.1, 0.1), first_forks=first_forks)
    trees = grow(SimulatedEngine(two_speeds()), options, 500, seed=2)
    for value, truth in ((length, MEAN_LENGTH), (success, PASS_RATE)):
        assert estimate(trees, value, before_fallback).distance(truth) < 3
        assert estimate(trees, value, without_fallback_plain).distance(truth) > 3
    assert estimate(trees, length, weighted).distance(MEAN_LENGTH) > 2


def without_fallback_plain(tree: Tree) -> Float64:
    """Equal weights of the leaves from before the fallback: the plain mean of a tree without one."""
    there = weights_of_leaves(tree)[1] > 0
    shares: Float64 = there / there.sum()
    return shares


@pytest.mark.slow
def test_weighted_estimates_of_log_normal_lengths_are_unbiased() -> None:
    law, mean = log_normal_law()
    options = replace(OPTIONS, width=16, max_tokens=160, segment=12, first_forks=(2, 8))
    trees = grow(SimulatedEngine(law), options, 150)
    assert estimate(trees, length, before_fallback).distance(mean) < 3
    assert estimate(trees, length, without_fallback_plain).distance(mean) > 3


def test_the_exact_values_are_those_of_the_law_up_to_its_rare_long_responses() -> None:
    assert 0.9 < MEAN_LENGTH / two_speeds().mean_length(START) < 1
