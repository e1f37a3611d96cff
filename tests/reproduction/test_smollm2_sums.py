"""The sums of the SmolLM2 demonstration, and its tables."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from smollm2_sums import ADDENDS, LARGEST, Sum, draw, problems
from smollm2_tables import arm_table, curve_table, difference_line, interval, speed_table

SUMS = st.lists(st.integers(1, LARGEST), min_size=2, max_size=4).map(lambda numbers: Sum(tuple(numbers)))


@given(SUMS)
def test_each_line_of_a_solution_is_true_and_adds_the_next_number(problem: Sum) -> None:
    *lines, answer = problem.solution().splitlines()
    total = problem.numbers[0]
    for line, number in zip(lines, problem.numbers[1:], strict=True):
        assert line == f"{total} + {number} = {total + number}"
        total += number
    assert answer == f"Answer: {total}"


@given(SUMS, st.integers(0, 4000), st.sampled_from(["", ".", "\n", " dollars"]))
def test_the_reward_is_1_exactly_if_the_last_number_is_the_sum(problem: Sum, number: int, end: str) -> None:
    assert problem.reward(problem.solution() + end) == 1.0
    assert problem.reward(f"{problem.solution()} or {number}{end}") == (number == sum(problem.numbers))
    assert problem.reward(f"no{end}") == 0.0


@given(st.integers(0, 2**31))
def test_problems_are_distinct_have_all_sizes_and_leave_out_the_held_out_ones(seed: int) -> None:
    held_out = frozenset(islice(problems(seed), 30))
    some = list(islice(problems(seed, without=held_out), 30))
    assert len({*some, *held_out}) == 60
    assert [len(problem.numbers) for problem in some] == 10 * [*ADDENDS]


def test_a_problem_is_a_function_of_its_seed() -> None:
    assert draw(np.random.default_rng(5), 3) == draw(np.random.default_rng(5), 3)


def test_the_interval_covers_the_mean_in_about_95_of_100_samples() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        mean, half = interval(list(rng.binomial(4, 0.3, 100) / 4))
        covered += abs(mean - 0.3) <= half
    # 0.95 with a standard deviation of 0.005, and 0.008 less because the law is not normal.
    assert 0.925 <= covered / 2000 <= 0.965


def records() -> list[dict[str, object]]:
    step = {"leaves": 10, "trees": 4, "mixed": 1, "tokens_flat": 100, "tokens_tree": 60, "tokens_packed": 65}
    seconds = {"sample_seconds": 2.0, "train_seconds": 1.0, "prefilled": 30, "seconds": 3.0}
    untrained = {"leaves": 10, "trees": 4, "mixed": 0, **seconds}
    return [
        {"arm": "independent", "step": 0, "decoded": 0, "seconds": 0.0, "passed": [0.0, 0.5, 0.0]},
        {"arm": "independent", "step": 1, "decoded": 400, "passed": [0.0, 1.0, 0.5], **step, **seconds},
        {"arm": "tree", "step": 0, "decoded": 0, "seconds": 0.0, "passed": [0.0, 0.5, 0.0]},
        {"arm": "tree", "step": 1, "decoded": 250, **untrained},
        {"arm": "tree", "step": 2, "decoded": 500, "passed": [0.5, 1.0, 1.0], **step, **seconds},
    ]


def test_the_table_of_arms_sums_over_steps_also_those_that_trained_nothing() -> None:
    lines = arm_table(records()).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")][1:-3] == [
        "tree", "2", "500", "25.0", "3.0", "12%", "0.400", "0.350", "4.0", "2.0",
    ]  # fmt: skip
    assert lines[3].endswith("| 0.167 +- 0.327 | 0.833 +- 0.327 |")


def test_the_curve_has_a_line_for_each_evaluation() -> None:
    assert [line.split("|")[2].strip() for line in curve_table(records()).splitlines()[2:]] == ["0", "1", "0", "2"]


def test_the_difference_is_paired_by_problems() -> None:
    # Differences 0.5, 0.0, 0.5: mean 1/3, standard error 1/6.
    assert difference_line(records(), "tree", "independent") == (
        "Pass rate of tree minus independent at the end: +33.3 +- 32.7 points; the interval does not contain 0."
    )


def test_the_table_of_packings_compares_with_one_rollout_in_each_row() -> None:
    timed = [("alone", 16, 2.0, 0.0), ("flat", 2, 1.0, 1e-3), ("trees", 1, 0.5, 1.1e-3)]
    names = ("packing", "rows", "seconds", "distance")
    lines = speed_table([dict(zip(names, each, strict=True)) | {"tokens": 100} for each in timed]).splitlines()
    assert lines[2] == "| packed trees | 1 | 100 | 0.500 | 0.25 | 1.1e-03 |"
    with pytest.raises(StopIteration):
        speed_table([])
