"""Micro-batches for other trainers: every sequence once, siblings together, within the capacity, even over ranks."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain, combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.errors import TreepackError
from treepack.pack.micro_batches import micro_batches

Tokens = tuple[int, ...]
sequence_lists = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=9)
HIDDEN = 1  # a token costs 6 pairs, so both parts of the work matter on tiny sequences


def arrays(sequences: list[Tokens]) -> list[Any]:
    return [np.array(tokens, np.int64) for tokens in sequences]


def prefixes(sequences: list[Tokens], *, flat: bool) -> list[Tokens]:
    """Return the tokens that a micro-batch computes, as prefixes; a shared one counts once unless `flat`."""
    every = [tokens[:n] for tokens in sequences for n in range(1, len(tokens) + 1)]
    return every if flat else sorted(set(every))


def work(sequences: list[Tokens], *, flat: bool) -> int:
    return sum(6 * HIDDEN + len(prefix) for prefix in prefixes(sequences, flat=flat))


def time(plan: list[list[Tokens]], ranks: int, *, flat: bool) -> int:
    works = sorted((work(batch, flat=flat) for batch in plan), reverse=True)
    return sum(works[::ranks])


def plan_of(sequences: list[Tokens], capacity: int, ranks: int, *, flat: bool) -> list[list[Tokens]]:
    indices = micro_batches(arrays(sequences), capacity, ranks, flat=flat, hidden_size=HIDDEN)
    return [[sequences[i] for i in batch] for batch in indices]


def all_plans(sequences: list[Tokens], capacity: int, *, flat: bool) -> list[list[list[Tokens]]]:
    """Return every division of the sorted sequences into ranges within the capacity."""
    ordered, plans = sorted(sequences), []
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            bounds = [0, *cuts, len(ordered)]
            plan = [ordered[a:b] for a, b in pairwise(bounds)]
            if all(len(batch) == 1 or len(prefixes(batch, flat=flat)) <= capacity for batch in plan):
                plans.append(plan)
    return plans


@given(sequence_lists, st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_every_sequence_is_in_one_micro_batch_within_the_capacity(
    sequences: list[Tokens], capacity: int, ranks: int, flat: bool
) -> None:
    indices = micro_batches(arrays(sequences), capacity, ranks, flat=flat)
    assert sorted(i for batch in indices for i in batch) == list(range(len(sequences)))
    assert len(indices) % ranks == 0
    for batch in indices:
        mine = [sequences[i] for i in batch]
        assert len(mine) <= 1 or len(prefixes(mine, flat=flat)) <= capacity


@given(sequence_lists, st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_micro_batches_are_ranges_of_the_trie_order_with_falling_work(
    sequences: list[Tokens], capacity: int, ranks: int, flat: bool
) -> None:
    plan = plan_of(sequences, capacity, ranks, flat=flat)
    assert list(chain(*sorted(plan))) == sorted(sequences)
    works = [work(batch, flat=flat) for batch in plan]
    assert works == sorted(works, reverse=True)


@given(sequence_lists.flatmap(lambda s: st.tuples(st.just(s), st.permutations(s))), st.integers(1, 12), st.booleans())
def test_the_order_of_arrival_does_not_matter(
    lists: tuple[list[Tokens], list[Tokens]], capacity: int, flat: bool
) -> None:
    first, second = (plan_of(each, capacity, 2, flat=flat) for each in lists)
    assert first == second


@given(sequence_lists.filter(bool), st.integers(1, 12), st.booleans())
def test_on_one_rank_no_other_cut_has_less_work(sequences: list[Tokens], capacity: int, flat: bool) -> None:
    ours = plan_of(sequences, capacity, 1, flat=flat)
    best = min(
        (sum(work(batch, flat=flat) for batch in plan), len(plan)) for plan in all_plans(sequences, capacity, flat=flat)
    )
    assert (sum(work(batch, flat=flat) for batch in ours), len(ours)) == best


@given(sequence_lists.filter(bool), st.integers(1, 12), st.integers(2, 3), st.booleans())
def test_on_several_ranks_the_time_is_near_the_minimum(
    sequences: list[Tokens], capacity: int, ranks: int, flat: bool
) -> None:
    ours = time(plan_of(sequences, capacity, ranks, flat=flat), ranks, flat=flat)
    best = min(time(plan, ranks, flat=flat) for plan in all_plans(sequences, capacity, flat=flat))
    assert best <= ours <= 1.5 * best


def test_the_example() -> None:
    sequences = [np.array(list(map(ord, text))) for text in ("abc", "xy", "abd", "xz", "abce")]
    assert micro_batches(sequences, 5) == [[0, 4, 2], [1, 3]]
    assert micro_batches(sequences, 5, ranks=2) == [[0, 4, 2], [1, 3]]
    assert micro_batches(sequences, 7, flat=True) == [[0, 4], [2, 1, 3]]


def test_ranks_get_even_work_where_the_trees_allow_it() -> None:
    rng = np.random.default_rng(0)
    # 64 prompts of 60 tokens, 6 completions of 20 to 150 tokens each, in any order
    sequences: list[Tokens] = []
    for _ in range(64):
        prompt = rng.integers(0, 1000, 60).tolist()
        sequences += [(*prompt, *rng.integers(0, 1000, rng.integers(20, 150)).tolist()) for _ in range(6)]
    sequences = [sequences[i] for i in rng.permutation(len(sequences))]
    works = [work(batch, flat=False) for batch in plan_of(sequences, 2048, 8, flat=False)]
    # Repeated prefixes and waiting ranks together cost at most 8 %.
    assert sum(works[::8]) * 8 <= 1.08 * work(sequences, flat=False)


def test_flat_values_with_offsets_are_the_same_as_a_list() -> None:
    sequences = arrays([(1, 2, 3), (), (1, 2), (4,)])
    values, offsets = np.concatenate(sequences), np.array([0, 3, 3, 5, 6])
    assert micro_batches((values, offsets), 3) == micro_batches(sequences, 3)


def test_a_rank_without_a_sequence_gets_an_empty_micro_batch() -> None:
    assert micro_batches(arrays([(1, 2), (3,)]), 8, ranks=4) == [[0], [1], [], []]
    assert micro_batches([], 8, ranks=4) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([np.zeros((2, 2), np.int64)], 4), "sequence 0 has shape"),
        (([np.zeros(2)], 4), "dtype float64"),
        (([np.array(3)], 4), "has shape"),
        (([np.array([3, -1])], 4), "token ids are -1 to 3"),
        (((np.zeros(2, np.int64),), 4), "a tuple must be"),
        (([], 0), "capacity is 0"),
        (([], 4, 0), "ranks is 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        micro_batches(*arguments)


def test_it_imports_numpy_only() -> None:
    program = "import sys; from treepack.pack.micro_batches import micro_batches; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "numpy" in done.stdout.split()
    assert not {"torch", "polars", "ortools", "pyarrow", "scipy"} & set(done.stdout.split())
