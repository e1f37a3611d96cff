"""Ranges of the sorted order: keys compare as trajectories do, and splitters cut only where they may."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import make, sequences
from treepack.cluster import trie_ranges as ranges_of_trie
from treepack.cluster.sequence_table import sequence_table, table_sequences
from treepack.cluster.trie_ranges import choose_splitters, order_keys, partition_key, range_of_rows, sample_keys
from treepack.sequences import collect
from treepack.trie.builders.in_memory import Partition, partitions
from treepack.trie.nodes import sorted_by_tokens

GROUPS = ["g", "g\0", "g\0\0", "", "\N{EURO SIGN}", "ga"]
SHARES = st.sampled_from(["all", "group", "none"])


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Tables of trajectories with hostile groups, and steps."""
    made = [
        make(f"t{i}", tokens, group=draw(st.sampled_from(GROUPS)), step=draw(st.sampled_from([None, -1, 0, 7])))
        for i, tokens in enumerate(draw(sequences(max_count=12)))
    ]
    return sequence_table(collect(made), part=3, first_row=5)


@given(st.lists(st.tuples(st.tuples(st.booleans(), st.integers(-(2**63), 2**63 - 1)), st.text(max_size=3)), min_size=2))
def test_keys_of_partitions_compare_as_partitions(pairs: list[Partition]) -> None:
    assert [pair for _, pair in sorted((partition_key(pair), pair) for pair in pairs)] == sorted(pairs)


@given(table=tables(), share=SHARES)
def test_keys_sort_as_the_trie_does(table: pa.Table, share: str) -> None:
    keys = order_keys(table, share=share)
    made = table_sequences(table)
    ranks, _ = partitions(table, share=share)
    order = sorted_by_tokens(made.tokens, made.offsets, ranks, range(len(keys)))
    assert [keys[i] for i in order] == sorted(keys)


@given(table=tables(), share=SHARES, num_ranges=st.integers(1, 6), every=st.integers(1, 9))
def test_ranges_follow_the_order_and_never_part_equal_keys(
    table: pa.Table, share: str, num_ranges: int, every: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_of_trie, "SAMPLE_REST", every)
        samples = sample_keys(table, share=share, every=every)
    splitters = choose_splitters(samples, num_ranges)
    ranges = range_of_rows(table, splitters, share)
    assert len(splitters) < num_ranges
    assert splitters == sorted(set(splitters))
    keys = order_keys(table, share=share)
    by_key = sorted(zip(keys, ranges.tolist(), strict=True))
    assert [number for _, number in by_key] == sorted(ranges.tolist())
    assert len(set(by_key)) == len(set(keys))
    if share == "group":
        pairs = list(zip(table["step"].to_pylist(), table["group_id"].to_pylist(), strict=True))
        assert len({*zip(pairs, ranges.tolist(), strict=True)}) == len({*pairs})


def test_splitters_are_short_and_divide_the_tokens_evenly() -> None:
    generator = np.random.default_rng(0)
    start = [7] * 300
    made = [make(f"t{i}", [*start, *generator.integers(0, 9, 400).tolist()], group=f"g{i % 5}") for i in range(200)]
    table = sequence_table(collect(made), part=0, first_row=0)
    samples = sample_keys(table, share="all", every=300)
    splitters = choose_splitters(samples, 4)
    counts = np.bincount(range_of_rows(table, splitters, "all"))
    assert len(counts) == 4
    assert counts.max() < 1.3 * counts.min()
    assert max(map(len, samples)) < 4 * len(start) + 2 * ranges_of_trie.SAMPLE_REST
    assert max(map(len, splitters)) < len(partition_key(((False, 0), ""))) + 4 * (len(start) + 8)


@given(table=tables(), cut=st.integers(0, 12))
def test_tables_of_several_parts_have_the_sequences_of_all(table: pa.Table, cut: int) -> None:
    whole = table_sequences(table)
    parts = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    again = table_sequences(parts)
    assert np.array_equal(again.tokens, whole.tokens)
    assert np.array_equal(again.offsets, whole.offsets)
    assert table["arrival"].to_pylist() == [(3 << 32) + 5 + i for i in range(table.num_rows)]
