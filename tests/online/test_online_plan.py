"""A planned batch in memory loses nothing, shares every prefix inside a row, and leads back to the caller's form."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.oracle_online import FORMS, MemoryBatch, as_lists, in_form, random_batches
from treepack.data.batch import Batch
from treepack.errors import TreepackError
from treepack.online import OnlineBatch, OnlineOptions, plan_batch

CAPACITIES = st.sampled_from([1, 3, 8, 20, None])


def planned(batch: MemoryBatch, form: str, options: OnlineOptions, **others: Any) -> tuple[OnlineBatch, Any]:
    ids, mask = in_form(batch.sequences, form, fill=-100, dtype=torch.int64)
    scored, _ = in_form(batch.scored, form, fill=True, dtype=torch.bool)
    return plan_batch(ids, mask, scored, options, **others), mask


def prefix(row: Batch, token: int) -> tuple[int, ...]:
    """The tokens from the root to `token`, by the parents alone."""
    path = []
    while token >= 0:
        path.append(int(row.input_ids[token]))
        token = int(row.parent[token])
    return tuple(path[::-1])


@settings(max_examples=50)
@given(batch=random_batches(), capacity=CAPACITIES, method=st.sampled_from(["contiguous", "contiguous", "auto"]))
def test_every_sequence_is_a_path_of_one_row_and_rows_share_all_prefixes(
    batch: MemoryBatch, capacity: int | None, method: str
) -> None:
    plan, _ = planned(batch, "list", OnlineOptions(capacity=capacity, method=method))
    ends: dict[int, tuple[int, ...]] = {}
    for row in plan.rows:
        paths = [prefix(row, end) for end in row.trajectory_ends.tolist()]
        ends |= dict(zip(map(int, row.trajectory_ids), paths, strict=True))
        distinct = {path[:n] for path in paths for n in range(1, len(path) + 1)}
        assert row.num_tokens == len(distinct)
        assert {prefix(row, token) for token in range(row.num_tokens)} == distinct
        assert row.position_ids.tolist() == [len(prefix(row, token)) - 1 for token in range(row.num_tokens)]
        assert row.num_tokens <= max(capacity or 1000, *map(len, paths))
        assert row.tokens_flat == sum(map(len, paths))
    assert ends == {i: tuple(each) for i, each in enumerate(batch.sequences) if each}
    everywhere = {tuple(each[:n]) for each in batch.sequences for n in range(1, len(each) + 1)}
    assert plan.tokens_tree == len(everywhere)
    assert plan.tokens_flat == sum(map(len, batch.sequences))
    sizes = [row.num_tokens for row in plan.rows]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=50)
@given(batch=random_batches(), capacity=CAPACITIES, form=st.sampled_from(FORMS))
def test_values_of_tokens_come_back_in_the_form_of_the_batch(
    batch: MemoryBatch, capacity: int | None, form: str
) -> None:
    plan, mask = planned(batch, form, OnlineOptions(capacity=capacity))
    numbers: dict[tuple[int, ...], float] = {}

    def number(path: tuple[int, ...]) -> float:
        return numbers.setdefault(path, len(numbers) + 1.0)

    rows = [row for row in plan.rows if row.terms is not None]
    values = [torch.tensor([number(prefix(row, t)) for t in row.terms.tokens.tolist()]) for row in rows if row.terms]
    result = plan.scatter(values)
    expected = [[0.0] * len(each) for each in batch.sequences]
    for i, j in batch.terms:
        expected[i][j] = number(tuple(batch.sequences[i][: j + 1]))
    assert [each.tolist() for each in as_lists(result, mask)] == expected
    if mask is not None:
        assert not result[~torch.as_tensor(mask).bool()].any()
    assert [place for i in range(len(rows)) for place in plan.row_places(i).tolist()] == plan.places.tolist()


@settings(max_examples=30)
@given(batch=random_batches(), form=st.sampled_from(FORMS), data=st.data())
def test_a_token_has_one_entry_for_each_temperature(batch: MemoryBatch, form: str, data: st.DataObject) -> None:
    one = st.sampled_from([0.5, 1.0])
    of_each = [data.draw(st.lists(one, min_size=len(each), max_size=len(each))) for each in batch.sequences]
    temperature, _ = in_form(of_each, form, fill=0.0, dtype=torch.float64)
    plan, _ = planned(batch, form, OnlineOptions(), temperature=temperature)
    pairs = sorted((tuple(batch.sequences[i][: j + 1]), of_each[i][j]) for i, j in batch.terms)
    entries = []
    terms = []
    for row in plan.rows:
        assert row.terms is not None
        assert row.terms.temperature is not None
        paths = [prefix(row, token) for token in row.terms.tokens.tolist()]
        entries += list(zip(paths, row.terms.temperature.tolist(), strict=True))
        terms += [entries[k] for k in row.terms.index.tolist()]
    assert sorted(entries) == sorted(set(pairs))
    assert sorted(terms) == pairs
    assert plan.temperature is None


def test_the_temperature_of_each_sequence_is_that_of_its_tokens() -> None:
    plan = plan_batch([np.array([1, 2, 3]), np.array([1, 2])], temperature=torch.tensor([0.5, 2.0]))
    (row,) = plan.rows
    assert row.terms is not None
    assert row.terms.temperature is not None
    assert list(zip(row.terms.tokens.tolist(), row.terms.temperature.tolist(), strict=True)) == [
        (1, 0.5),
        (1, 2.0),
        (2, 0.5),
    ]


def test_a_sequence_over_the_capacity_is_alone_in_its_row_except_for_its_prefixes() -> None:
    sequences = [np.arange(9), np.arange(4), np.array([0, 1, 7]), np.array([0, 1, 8])]
    plan = plan_batch(sequences, options=OnlineOptions(capacity=5))
    assert [sorted(row.trajectory_ids) for row in plan.rows] == [["0", "1"], ["2", "3"]]


def test_nested_tensors_keep_the_offsets_of_the_caller() -> None:
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
    plan = plan_batch(ids)
    values = plan.scatter([torch.ones(len(row.terms.tokens)) for row in plan.rows if row.terms])
    # torch adds two nested tensors only if they have the same offsets.
    assert (values + ids).values().tolist() == [0.0, 2.0, 2.0, 4.0, 5.0]


def test_nested_tensors_with_holes_are_read_without_them() -> None:
    values, offsets = torch.tensor([1, 2, 9, 1, 3]), torch.tensor([0, 3, 5])
    ids = torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([2, 2]))
    plan = plan_batch(ids)
    assert plan.tokens_flat == 4
    assert sorted(plan.places.tolist()) == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(3)}, r"has the shape \[3\]; expected padded ids"),
        ({"input_ids": torch.zeros(2, 3)}, "has the dtype float32; expected integers"),
        ({"input_ids": [np.zeros((2, 2), int)]}, r"sequence 0 has the shape \[2, 2\]"),
        ({"input_ids": torch.tensor([[5, -100]])}, "sequence 0 contains the token id -100; .*mask padding out"),
        ({"input_ids": [np.arange(3)], "attention_mask": [np.ones(3)]}, "attention_mask is for padded ids"),
        ({"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 4)}, "attention_mask is not of the"),
        ({"input_ids": torch.ones(2, 3).long(), "scored": torch.ones(6)}, "scored is not of the shape of input_ids"),
        ({"input_ids": [np.arange(3)], "scored": [np.ones(2)]}, "scored is not of the shape of input_ids"),
        ({"input_ids": [np.arange(3)], "temperature": 0.0}, "temperature 0.0 of a scored token; expected a number"),
        ({"input_ids": [np.arange(3)], "temperature": np.array([1.0, 1.0])}, "temperature is not of the shape"),
        ({"input_ids": torch.ones(1, 2).long(), "temperature": torch.tensor([[0.0, torch.nan]])}, "temperature nan"),
    ],
)
def test_other_shapes_and_values_are_refused_in_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=f"^plan_batch: .*{message}"):
        plan_batch(**arguments)


@pytest.mark.parametrize("changes", [{"capacity": 0}, {"chunk": 0}, {"method": "best"}, {"effort": "none"}])
def test_options_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TreepackError, match=f"^OnlineOptions: {next(iter(changes))} is .*; expected"):
        OnlineOptions(**changes)


def test_values_of_another_number_of_tokens_are_refused() -> None:
    plan = plan_batch([np.arange(3)])
    with pytest.raises(TreepackError, match=r"have the sizes \[1\]; expected \[2\]"):
        plan.scatter([torch.zeros(1)])


@pytest.mark.slow
def test_the_usual_method_imports_neither_arrow_nor_the_solver() -> None:
    program = (
        "import sys, numpy, treepack; "
        "plan = treepack.plan_batch([numpy.arange(5), numpy.arange(3)], options=treepack.OnlineOptions(capacity=4)); "
        "print(len(plan.rows), [name for name in ('polars', 'ortools', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1 []\n"
