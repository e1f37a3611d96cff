"""Allocation of rollouts: exact against every allocation there is and against OR-Tools, within budgets and maxima."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.research.trace.allocation import allocate_prefixes, allocate_roots, prefix_utility, root_utility
from treepack.trajectory import Float64, Int64

# Ties, certain outcomes and values that cancel in 1 - v are frequent; other chances are drawn from all of 0 .. 1.
VALUES = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 0.25, 0.75, 0.1, 1e-12, 1e-20]), st.floats(0, 1))


def mixed(value: float, count: int) -> float:
    """Utility of a prompt by equation 12, term by term, without rounding: 1 - (1 - v)^m cancels for small v."""
    exact = Fraction(value)
    return float(1 - exact**count - (1 - exact) ** count) if count >= 2 else 0.0


def best_roots(values: list[float], budget: int, maximum: list[int]) -> float | None:
    """Return the highest sum of utilities over all allocations, found by trying each; None if there is none."""
    options = [[0, *range(2, min(most, budget) + 1)] for most in maximum]
    sums = [
        math.fsum(mixed(value, count) for value, count in zip(values, counts, strict=True))
        for counts in itertools.product(*options)
        if sum(counts) == budget
    ]
    return max(sums, default=None)


@given(
    st.lists(st.tuples(VALUES, st.sampled_from([0, 1, 2, 2, 2, 3, 4, 9])), min_size=1, max_size=5), st.integers(2, 12)
)
def test_no_allocation_to_prompts_is_better(prompts: list[tuple[float, int]], budget: int) -> None:
    values, maximum = [value for value, _ in prompts], [most for _, most in prompts]
    best = best_roots(values, budget, maximum)
    if best is None:
        with pytest.raises(TreepackError):
            allocate_roots(np.array(values), budget, maximum=np.array(maximum))
        return
    allocation = allocate_roots(np.array(values), budget, maximum=np.array(maximum)).tolist()
    assert sum(allocation) == budget
    assert all(count == 0 or 2 <= count <= most for count, most in zip(allocation, maximum, strict=True))
    assert math.fsum(map(mixed, values, allocation)) == pytest.approx(best, rel=0, abs=1e-14)


@given(st.lists(VALUES, min_size=1, max_size=5), st.integers(2, 12))
def test_no_allocation_without_maxima_is_better(values: list[float], budget: int) -> None:
    best = best_roots(values, budget, [budget] * len(values))
    allocation = allocate_roots(np.array(values), budget).tolist()
    assert (sum(allocation), 1 in allocation) == (budget, False)
    assert math.fsum(map(mixed, values, allocation)) == pytest.approx(best, rel=0, abs=1e-14)


def by_ortools(utility: list[list[float]], counts: list[list[int]], budget: int, scale: int) -> int:
    """Return the optimum of the scaled and rounded utilities, with one count for each anchor."""
    # One switch for each anchor and possible count; exactly one switch of an anchor is on.
    model = cp_model.CpModel()
    switches = [[model.new_bool_var("") for _ in options] for options in counts]
    for anchor in switches:
        model.add_exactly_one(anchor)
    flat = [variable for anchor in switches for variable in anchor]
    model.add(sum(c * x for c, x in zip(itertools.chain(*counts), flat, strict=True)) == budget)
    model.maximize(sum(round(u * scale) * x for u, x in zip(itertools.chain(*utility), flat, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.relative_gap_limit = 0
    assert solver.solve(model) == cp_model.OPTIMAL
    best: float = solver.objective_value
    return round(best)


@pytest.mark.parametrize(("seed", "budget", "most"), [(0, 61, 40), (1, 120, 12), (2, 41, 3), (3, 33, 2), (4, 201, 30)])
def test_ortools_finds_no_better_allocation_to_prompts(seed: int, budget: int, most: int) -> None:
    # CP-SAT solves in integers: utilities are rounded to 1e-9, so two optima differ by at most one unit per prompt.
    random, scale = np.random.default_rng(seed), 10**9
    values = random.beta(0.5, 0.5, 40)
    maximum = np.where(random.random(40) < 0.5, 2, max(most, 3))
    allocation = allocate_roots(values, budget, maximum=maximum)
    counts = [[0, *range(2, limit + 1)] for limit in maximum.tolist()]
    utility = [[mixed(v, m) for m in options] for v, options in zip(values.tolist(), counts, strict=True)]
    total = sum(round(mixed(v, m) * scale) for v, m in zip(values.tolist(), allocation.tolist(), strict=True))
    assert allocation.sum() == budget
    assert abs(by_ortools(utility, counts, budget, scale) - total) <= len(values)


def agrees(value: float, reward: float) -> float:
    return reward * value + (1 - reward) * (1 - value)


def differs(value: float, reward: float, count: int) -> float:
    """Utility of a prefix by equation 15, 1 - q^k, without rounding."""
    exact = Fraction(value)
    return float(1 - (exact if reward else 1 - exact) ** count)


PREFIXES = st.lists(st.tuples(VALUES, st.sampled_from([0.0, 1.0])), min_size=1, max_size=4)


@given(st.lists(st.tuples(PREFIXES, st.integers(0, 6)), min_size=1, max_size=3))
def test_no_allocation_to_the_prefixes_of_a_group_is_better(
    groups: list[tuple[list[tuple[float, float]], int]],
) -> None:
    prefixes = [prefix for listed, _ in groups for prefix in listed]
    group = np.repeat(np.arange(len(groups)), [len(listed) for listed, _ in groups])
    value, reward = np.array(prefixes).T
    allocation = allocate_prefixes(value, reward, group, np.array([budget for _, budget in groups]))
    for g, (listed, budget) in enumerate(groups):
        of_group = allocation[group == g].tolist()
        sums = [
            math.fsum(1 - agrees(*prefix) ** k for prefix, k in zip(listed, counts, strict=True))
            for counts in itertools.product(range(budget + 1), repeat=len(listed))
            if sum(counts) == budget
        ]
        assert sum(of_group) == budget
        assert math.fsum(1 - agrees(*prefix) ** k for prefix, k in zip(listed, of_group, strict=True)) == pytest.approx(
            max(sums), rel=0, abs=1e-14
        )


@given(st.lists(st.tuples(VALUES, st.integers(0, 40)), min_size=1))
def test_utilities_are_the_chances_of_mixed_outcomes(pairs: list[tuple[float, int]]) -> None:
    value, count = np.array([v for v, _ in pairs]), np.array([m for _, m in pairs])
    assert root_utility(value, count) == pytest.approx([mixed(*pair) for pair in pairs], rel=1e-12, abs=1e-15)
    for reward in (0.0, 1.0):
        expected = [differs(v, reward, k) for v, k in pairs]
        utility = prefix_utility(value, np.full(len(pairs), reward), count)
        assert utility == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_of_equal_prompts_and_prefixes_the_first_get_more() -> None:
    # Blocks of three are worth the same everywhere; the last two units start a third prompt.
    assert allocate_roots(np.full(4, 0.5), 8).tolist() == [3, 3, 2, 0]
    # Blocks 3 and 3 leave one unit, so one block becomes two to start the third prompt with a pair.
    assert allocate_roots(np.full(3, 0.5), 7).tolist() == [2, 3, 2]
    assert allocate_roots(np.array([0.0, 1.0]), 5).tolist() == [5, 0]
    even = allocate_prefixes(np.full(3, 0.5), np.ones(3), np.zeros(3, np.int64), np.array([4]))
    assert even.tolist() == [2, 1, 1]


def test_a_group_without_prefixes_spends_nothing() -> None:
    allocation = allocate_prefixes(np.array([0.5]), np.array([1.0]), np.array([1]), np.array([4, 2, 4]))
    assert allocation.tolist() == [2]


LARGE: Float64 = np.random.default_rng(0).beta(0.3, 0.3, 100_000)


def test_a_hundred_thousand_prompts_share_a_million_rollouts_near_one_price() -> None:
    count = allocate_roots(LARGE, 1_000_000)
    assert count.sum() == 1_000_000
    assert not (count == 1).any()
    # Greedy means one price: no rollout already given is worth less than the next one of any prompt.
    open_, first = count >= 3, LARGE * (1 - LARGE)
    last = first * (LARGE ** (count - 2.0) + (1 - LARGE) ** (count - 2.0))
    following = np.where(open_, first * (LARGE ** (count - 1.0) + (1 - LARGE) ** (count - 1.0)), first)
    assert last[open_].min() >= following.max() * (1 - 1e-9)


BAD: list[tuple[Float64, int, Int64 | None, str]] = [
    (np.array([0.5]), 1, None, "a budget of 1 is too small for one group; give at least 2 rollouts"),
    (np.array([0.5]), 10**12, None, "a budget of 1,000,000,000,000 is more than 1,000,000,000; give a smaller one"),
    (np.array([0.5, 1.5]), 4, None, "a predicted value is 1.5; expected a chance of success in 0 .. 1"),
    (np.array([math.nan]), 4, None, "a predicted value is nan"),
    (np.zeros(0), 4, None, "there is no prompt to give rollouts to"),
    (np.array([0.5, 0.5, 0.5]), 3, np.array([2, 2, 1]), "an odd budget cannot be spent two by two"),
    (np.array([0.5, 0.5]), 9, np.array([4, 4]), "a budget of 9 is more than the 8 rollouts that the maxima allow"),
    (np.array([0.5, 0.5]), 2, np.array([1, 0]), "a budget of 2 is more than the 0 rollouts"),
]


@pytest.mark.parametrize(("value", "budget", "maximum", "message"), BAD)
def test_what_cannot_be_allocated_is_refused(value: Float64, budget: int, maximum: Int64 | None, message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        allocate_roots(value, budget, maximum=maximum)


def test_rewards_between_failure_and_success_are_refused() -> None:
    assert "TRACE needs rewards of 0 or 1" in refusal(
        allocate_prefixes, np.array([0.5]), np.array([0.5]), np.array([0]), np.array([1])
    )
