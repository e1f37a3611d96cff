"""Columns of trajectories in several chunks, and with more values than one Arrow list array can contain.

An Arrow list array has offsets of 32 bits, so it ends at 2^31 - 1 values. A chunked column does not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from support.manifests import manifest_of
from support.strategies import make
from treepack import sequences as sequences_module
from treepack.analysis.show.selection import subset
from treepack.analysis.turns import SortedTurns, cut_to_turns
from treepack.files import schema
from treepack.pack.check import checked_rows
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.pack.rows import pack_rows
from treepack.report.payload import mean_advantages
from treepack.rl.group_tree import group_codes
from treepack.sequences import SpanView, collect, list_values, num_trained, take_rows, text_codes
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.check import check_trie
from treepack.trie.trie import Trie, trajectories_of


def rollouts() -> list[Trajectory]:
    """Ten rollouts; each third has no advantages, and each fourth has several spans."""
    result = []
    for i in range(10):
        tokens = [1, 2, *range(10, 10 + i), i]
        spans = [(1, 2, 1.0), (2, len(tokens), 0.5)] if i % 4 == 0 else [(1, len(tokens), 1.0)]
        values = {} if i % 3 == 0 else {"advantages": np.arange(len(tokens) - 1) - 0.5 * i}
        result.append(make(f"t{i}", tokens, spans=spans, reward=float(i), group=f"g{i % 3}", **values))  # type: ignore[arg-type]
    return result


def in_chunks(table: pa.Table, size: int) -> pa.Table:
    """`table` with a chunk for each `size` rows, and an empty one at the end."""
    pieces = [table.slice(i, size).combine_chunks() for i in range(0, table.num_rows, size)]
    return pa.concat_tables([*pieces, table.schema.empty_table()])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_chunks_make_no_difference(size: int) -> None:
    whole = build_trie(rollouts())
    chunked = replace(whole, trajectories=in_chunks(whole.trajectories, size))
    assert chunked.trajectories["trained"].num_chunks > 1
    spans, same = SpanView.of(whole.trajectories), SpanView.of(chunked.trajectories)
    for name in ("offsets", "starts", "ends", "weights"):
        assert np.array_equal(getattr(spans, name), getattr(same, name))
    assert num_trained(whole.trajectories) == num_trained(chunked.trajectories) == spans.sizes.sum()
    pairs = zip(
        list_values(whole.trajectories, "advantages"), list_values(chunked.trajectories, "advantages"), strict=True
    )
    for a, b in pairs:
        assert (a is None) == (b is None)
        assert a is None or (b is not None and np.array_equal(a, b))
    assert text_codes(whole.trajectories["group_id"]).tolist() == text_codes(chunked.trajectories["group_id"]).tolist()
    assert [t.trajectory_id for t in trajectories_of(chunked)] == [t.trajectory_id for t in trajectories_of(whole)]
    rows = list(pack_rows(chunked, plan_rows(whole, capacity=64)))
    assert [row.loss_weight.tolist() for row in rows] == [
        row.loss_weight.tolist() for row in pack_rows(whole, plan_rows(whole, capacity=64))
    ]


def test_tables_without_rows_have_no_values() -> None:
    table = schema.TRAJECTORIES.empty_table()
    empty = pa.Table.from_batches([], schema.TRAJECTORIES)
    for each in (table, empty):
        assert list(list_values(each, "advantages")) == []
        assert SpanView.of(each).offsets.tolist() == [0]
        assert text_codes(each["group_id"]).tolist() == []


def test_long_input_is_collected_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = collect(rollouts())
    monkeypatch.setattr(sequences_module, "MAX_LIST_VALUES", 8)
    sequences = collect(rollouts())
    assert sequences.table["advantages"].num_chunks > 5
    assert sequences.table.equals(expected.table)
    assert build_trie(rollouts()).trajectories["advantages"].num_chunks > 5
    order = np.array([9, 0, 3, 3, 1])
    assert take_rows(sequences.table, order).equals(expected.table.take(pa.array(order)))
    assert take_rows(sequences.table, order[:0]).equals(expected.table.slice(0, 0))


# 520 trajectories that end at the leaves of a star, and train each of the 2^22 tokens of its trunk: 2.2e9 values.
NUM, TRUNK = 520, 1 << 22


def star() -> Trie:
    """A trie whose columns of values per trained token have more than 2^31 of them, in chunks that share one buffer."""
    values = {
        "advantages": pa.array(np.zeros(TRUNK)),
        **{f"{name}_logprobs": pa.array(np.zeros(TRUNK, np.float32)) for name in ("sampling", "old", "ref")},
    }
    spans = [pa.array([1], pa.int32()), pa.array([TRUNK + 1], pa.int32()), pa.array([1.0])]
    each: dict[str, pa.Array] = {
        name: pa.ListArray.from_arrays(pa.array([0, TRUNK], pa.int32()), flat) for name, flat in values.items()
    }
    each["trained"] = pa.ListArray.from_arrays(
        pa.array([0, 1], pa.int32()), pa.StructArray.from_arrays(spans, fields=list(schema.SPAN))
    )
    numbers = np.arange(NUM, dtype=np.int32)
    whole = {
        "trajectory_id": [f"t{i}" for i in range(NUM)],
        "group_id": [f"g{i % 2}" for i in range(NUM)],
        "step": [None] * NUM,
        "tree_id": np.zeros(NUM, np.int32),
        "node_id": numbers + 1,
        "num_tokens": np.full(NUM, TRUNK + 1, np.int32),
        "weight": np.ones(NUM),
        "reward": np.ones(NUM),
        "advantage": [None] * NUM,
        "metadata": ["{}"] * NUM,
        "source": ["made"] * NUM,
    }
    columns = [
        pa.chunked_array([each[field.name]] * NUM) if field.name in each else pa.array(whole[field.name], field.type)
        for field in schema.TRAJECTORIES
    ]
    return Trie(
        tokens=np.concatenate([np.zeros(TRUNK, np.int32), numbers]),
        node_start=np.concatenate([[0], TRUNK + np.arange(NUM + 1)]),
        node_end=np.concatenate([[NUM + 1], numbers + 2]).astype(np.int32),
        parent=np.concatenate([[-1], np.zeros(NUM)]).astype(np.int32),
        depth=np.concatenate([[0], np.full(NUM, TRUNK)]),
        num_passing=np.concatenate([[NUM], np.ones(NUM)]).astype(np.int32),
        end_node=numbers + 1,
        trajectories=pa.Table.from_arrays(columns, schema=schema.TRAJECTORIES),
        share="all",
    )


@pytest.mark.slow
def test_more_values_than_a_list_array_can_contain() -> None:
    trie = star()
    assert NUM * TRUNK > 2**31
    assert num_trained(trie.trajectories) == NUM * TRUNK
    check_trie(trie)  # all spans, and the number of values of every list
    assert group_codes(trie).tolist() == [i % 2 for i in range(NUM)]
    assert mean_advantages(trie).tolist() == [0] * NUM  # reads every value
    assert sum(len(values) for values in list_values(trie.trajectories, "old_logprobs") if values is not None) > 2**31
    assert next(trajectories_of(trie)).trajectory_id == "t0"
    # Only the row of the last trajectory is made: the terms of all rows would take 80 GB.
    plan = Plan("contiguous", RowLimits(TRUNK + 1), np.arange(NUM)[::-1])
    row = next(pack_rows(trie, plan))
    assert row.trajectory_ids == [f"t{NUM - 1}"]
    assert row.terms is not None
    assert row.terms.old_logprob is not None
    assert len(row.terms.old_logprob) == TRUNK
    assert next(checked_rows([row], manifest_of([row], capacity=TRUNK + 1), trie)) is row
    few = subset(trie, [0, NUM - 1])
    assert few.trajectories["trajectory_id"].to_pylist() == ["t0", f"t{NUM - 1}"]
    half = cut_to_turns(trie, SortedTurns(np.arange(NUM), np.ones(NUM, np.int64), np.full(NUM, TRUNK, np.int64)))
    assert half.num_nodes == 1
    assert half.num_trajectories == NUM
