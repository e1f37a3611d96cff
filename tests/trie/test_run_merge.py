"""Merging in ranges: the same order as in one range, for any number of runs and ranges."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treepack.trie.builders.run_merge import MergedOrder, SortedRun, merge, split
from treepack.trie.builders.spool import token_offsets
from treepack.trie.nodes import common_prefix

Sequences = list[tuple[int, list[int]]]  # partition and tokens


@contextmanager
def stored(contents: list[Sequences], *, whole: bool = False) -> Iterator[list[SortedRun]]:
    """Runs of `contents`, each sorted, one after the other in a file."""
    with tempfile.TemporaryFile() as file:
        runs = []
        for content in map(sorted, contents):
            arrays = [np.array(tokens, np.int32) for _, tokens in content]
            partition = np.array([part for part, _ in content], np.int32)
            shared = np.zeros(len(content), np.int32)
            for i in range(1, len(content)):
                if partition[i] == partition[i - 1]:
                    shared[i] = common_prefix(arrays[i - 1], arrays[i])
            skipped = np.zeros_like(shared) if whole else shared
            lengths = np.array([len(tokens) for tokens in arrays], np.int32)
            offsets = token_offsets(file.tell(), lengths, skipped)
            for tokens, skip in zip(arrays, skipped, strict=True):
                file.write(tokens[skip:].tobytes())
            runs.append(SortedRun(file.fileno(), offsets, partition, skipped, shared, lengths))
        file.flush()
        yield runs


runs_of = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=8),
    min_size=1,
    max_size=4,
).filter(any)


@given(runs_of, st.integers(1, 5), st.booleans(), st.booleans())
def test_ranges_together_are_the_whole_order(contents: list[Sequences], count: int, whole: bool, sharing: bool) -> None:
    with stored(contents, whole=whole) as runs:
        expected = merge(runs, sharing=sharing)
        order = MergedOrder()
        for limits in split(runs, count):
            order.extend(merge(runs, limits, sharing=sharing))
    assert order == expected
    flat = [sorted(contents[run])[row] for run, row in zip(order.run, order.row, strict=True)]
    assert flat == sorted(item for content in contents for item in content)


@given(runs_of)
def test_a_sequence_is_read_from_the_tokens_of_those_before_it(contents: list[Sequences]) -> None:
    with stored(contents) as runs:
        for run, content in zip(runs, contents, strict=True):
            assert [run.path(row).tolist() for row in range(len(content))] == [
                [partition, *tokens] for partition, tokens in sorted(content)
            ]


def test_ranges_are_about_even() -> None:
    rng = np.random.default_rng(0)
    contents = [[(0, rng.integers(0, 50, 100).tolist()) for _ in range(200)] for _ in range(5)]
    with stored(contents) as runs:
        sizes = [len(merge(runs, limits).run) for limits in split(runs, 4)]
    assert sum(sizes) == 1000
    assert len(sizes) == 4
    assert min(sizes) > 200
