"""Paths end for the right reason, at the first segment at which the reason holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tree_estimates import grow
from support.watched_engines import ScriptedLaw
from treepack.rollout.endings import MAX_PERIOD, MIN_REPEATED, ends_in_repeats
from treepack.rollout.options import TreeOptions
from treepack.rollout.simulated import SimulatedEngine
from treepack.rollout.tree import ANSWER, REPETITION, STOPPED, TOO_DEEP, TOO_LONG, TreeNode


def only_leaf(response: list[int], options: TreeOptions) -> TreeNode:
    """The path of one rollout with a fixed response, segment by segment."""
    options = replace(options, width=1, first_forks=1, fallback="none")
    (tree,) = grow(SimulatedEngine(ScriptedLaw(response)), options)
    (leaf,) = tree.leaves
    return leaf


def repeats_slowly(ids: list[int], times: int) -> bool:
    """The definition: count the copies of the last `period` tokens backwards from the end."""
    for period in range(1, min(MAX_PERIOD, len(ids)) + 1):
        run, copies = ids[-period:], 0
        while run == ids[len(ids) - (copies + 1) * period : len(ids) - copies * period]:
            copies += 1
        if copies >= times and copies * period >= MIN_REPEATED:
            return True
    return False


@given(
    st.lists(st.integers(1, 2), max_size=9),
    st.lists(st.integers(1, 3), min_size=1, max_size=70),
    st.integers(1, 70),
    st.integers(1, 30),
    st.lists(st.integers(1, 3), max_size=2),
)
def test_a_repetition_is_found_exactly_if_copies_of_a_run_are_at_the_end(
    before: list[int], run: list[int], copies: int, times: int, after: list[int]
) -> None:
    ids = (before + run * copies + after)[-2000:]
    assert ends_in_repeats(np.array(ids, np.int32), times) == repeats_slowly(ids, times)


@pytest.mark.parametrize(("segment", "end"), [(10, 80), (16, 80), (80, 80), (7, 77), (100, 100)])
def test_a_repetition_that_segments_cut_ends_the_path_at_the_first_possible_cut(segment: int, end: int) -> None:
    # 9 tokens, then 5 6 7 5 6 7 ...: 22 copies, 66 tokens, are complete after token 75.
    options = TreeOptions(segment=segment, depth=None, max_tokens=500, max_repeats=8)
    leaf = only_leaf([1, 2, 3, 4, 8, 9, 1, 3, 2] + [5, 6, 7] * 200, options)
    assert (leaf.finish, leaf.end - 1) == (REPETITION, end)


def test_random_text_and_short_rulers_are_no_repetition() -> None:
    rng = np.random.default_rng(0)
    for size in range(1, 2000, 13):
        assert not ends_in_repeats(rng.integers(1, 50, size).astype(np.int32), 2)
    assert not ends_in_repeats(np.full(MIN_REPEATED - 1, 45, np.int32), 8)
    assert ends_in_repeats(np.full(MIN_REPEATED, 45, np.int32), 8)


def test_long_runs_need_as_many_copies_as_the_option_says() -> None:
    paragraph = np.arange(40, dtype=np.int32)
    assert not ends_in_repeats(np.tile(paragraph, 7), 8)
    assert ends_in_repeats(np.tile(paragraph, 8), 8)


def test_a_path_ends_for_the_first_of_answer_stop_repetition_length_and_depth() -> None:
    """All five hold at once after 70 tokens; without the first one, the next is the reason."""
    run = [5] * 69
    options = TreeOptions(segment=70, depth=1, max_tokens=70, max_repeats=8, is_answer=lambda turn: len(turn) == 70)
    assert only_leaf([*run, 0], options).finish == ANSWER
    options = replace(options, is_answer=None)
    assert only_leaf([*run, 0], options).finish == STOPPED
    assert only_leaf([*run, 5], options).finish == REPETITION
    options = replace(options, max_repeats=0)
    assert only_leaf([*run, 5], options).finish == TOO_LONG
    assert only_leaf([*run, 5], replace(options, max_tokens=71)).finish == TOO_DEEP


def test_an_answer_is_looked_for_in_the_whole_turn_and_ends_the_path_without_a_stop_token() -> None:
    options = TreeOptions(segment=4, depth=None, max_tokens=100, is_answer=lambda turn: [7, 8] in pairs(turn.tolist()))
    leaf = only_leaf([1, 2, 3, 7, 8, 1, 1, 1, 1, 1], options)
    assert (leaf.finish, leaf.end - 1) == (ANSWER, 8)


def pairs(ids: list[int]) -> list[list[int]]:
    return [ids[i : i + 2] for i in range(len(ids) - 1)]
