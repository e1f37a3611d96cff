"""A batch in memory with recorded experts has the values of each sequence alone under its own experts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.oracle_model import gradients, worst_error
from support.oracle_online import FORMS, MemoryBatch, as_lists, in_form, random_batches
from support.recorded_routes import ROWS
from support.tiny_families import KeepFloat64, tiny_family
from treepack.attention import register
from treepack.errors import TreepackError
from treepack.model.collation import collate
from treepack.online import OnlineOptions, batch_statistics, plan_batch, tree_logprobs_like

SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8], [1, 2, 3], [1, 2, 3, 4, 5], [9], []]
BATCH = MemoryBatch(SEQUENCES, [[True] * len(each) for each in SEQUENCES])
RECORDED = [
    np.array([ROWS[(i + j) % 3 if j == 1 else 0] for j in range(len(each))]) for i, each in enumerate(SEQUENCES)
]


@functools.cache
def mixture() -> Any:
    register()
    return tiny_family("qwen3_moe", attention="treepack_reference", norm_topk_prob=True, num_hidden_layers=2)


def alone(model: Any, batch: MemoryBatch, recorded: list[Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities of each sequence alone, without a tree, and the gradients of their sum."""
    model.zero_grad()
    found = []
    for sequence, flags, routes in zip(batch.sequences, batch.scored, recorded, strict=True):
        ids = [np.array(sequence, np.int64)]
        one = [np.array(flags, bool)]
        values, _ = tree_logprobs_like(model, ids, None, one, routes=[routes])
        torch.autograd.backward(values[0].sum()) if values[0].requires_grad else None
        found.append(values[0].detach())
    return found, gradients(model)


@settings(max_examples=4, phases=[Phase.generate])
@given(batch=random_batches(), form=st.sampled_from(FORMS), capacity=st.sampled_from([1, 6, None]), data=st.data())
def test_values_and_gradients_are_those_of_each_sequence_alone(
    batch: MemoryBatch, form: str, capacity: int | None, data: st.DataObject
) -> None:
    numbers = [
        data.draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=n, max_size=n)) for n in map(len, batch.sequences)
    ]
    recorded = [np.array([ROWS[each] for each in row], np.int64).reshape(-1, 2, 2) for row in numbers]
    ids, mask = in_form(batch.sequences, form, fill=0, dtype=torch.int64)
    scored, _ = in_form(batch.scored, form, fill=False, dtype=torch.bool)
    method, recompute = data.draw(st.sampled_from(["contiguous", "auto"])), data.draw(st.booleans())
    options = OnlineOptions(capacity=capacity, method=method, recompute=recompute)
    planned = plan_batch(ids, mask, scored, options, routes=in_routes(recorded, form, ids))
    model = mixture()
    with KeepFloat64():
        expected, slopes = alone(model, batch, recorded)
        model.zero_grad()
        values, _ = batch_statistics(model, planned, options)
        found = as_lists(values, mask)
        if batch.terms:
            torch.autograd.backward(torch.cat([torch.as_tensor(each) for each in found]).sum())
            # Rows that are computed again in the backward pass are float32 in the norms of this model.
            assert worst_error(gradients(model), slopes) <= (1e-5 if recompute else 1e-9)
    for right, value in zip(expected, found, strict=True):
        assert torch.allclose(torch.as_tensor(value), right, rtol=0, atol=1e-10)


def in_routes(recorded: list[Any], form: str, ids: Any) -> Any:
    """`recorded` in a form of trainers; padding has zeros, as in verl."""
    if form == "list":
        return recorded
    if form == "jagged":
        joined = np.concatenate([np.zeros((0, 2, 2), np.int64), *recorded])
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(joined), ids.offsets())
    length = ids.shape[1]
    padded = np.zeros((len(recorded), length, 2, 2), np.int16)
    for row, routes in zip(padded, recorded, strict=True):
        size = len(routes)
        start = {"left": length - size, "both": (length - size) // 2}.get(form, 0)
        row[start : start + size] = routes
    return padded if form == "numpy" else torch.from_numpy(padded)


def test_recorded_experts_change_the_values() -> None:
    model, ids = mixture(), [np.array(each) for each in SEQUENCES]
    with torch.no_grad():
        free, _ = tree_logprobs_like(model, ids)
        replayed, _ = tree_logprobs_like(model, ids, routes=RECORDED)
        again, _ = tree_logprobs_like(model, ids)
    assert (free[0] - replayed[0]).abs().max() > 1e-3
    assert torch.equal(free[0], again[0])


def test_tokens_with_other_experts_are_shared_only_if_that_is_wanted() -> None:
    ids = [np.array(each) for each in SEQUENCES]
    split = plan_batch(ids, routes=RECORDED)
    first = plan_batch(ids, options=OnlineOptions(route_conflicts="first"), routes=RECORDED)
    assert first.tokens_tree == plan_batch(ids).tokens_tree == 9
    assert split.tokens_tree == 9 + 4


def test_rows_may_be_missing_at_the_end_and_in_whole_sequences() -> None:
    ids = [np.array(each) for each in SEQUENCES[:3]]
    (row,) = plan_batch(ids, routes=[RECORDED[0][:-1], None, RECORDED[2][:1]]).rows
    assert row.routes is not None
    assert row.routes.dtype == torch.uint8
    assert int((row.routes[:, 0, 0] == 255).sum()) == 1 + 4 + 1


def test_rows_of_several_lengths_and_types_are_collated() -> None:
    wide = [np.where(each == 3, 300, each) for each in RECORDED[:1]]
    (small,) = plan_batch([np.array(SEQUENCES[2])], routes=RECORDED[2:3]).rows
    (large,) = plan_batch([np.array(SEQUENCES[0])], routes=wide).rows
    joined = collate([small, replace(small, routes=None), large])["routes"].reshape(3, 5, 2, 2)
    assert joined.dtype == torch.int16
    assert joined[0, :2].tolist() == RECORDED[2].tolist()
    assert (joined[0, 2:] == -1).all()
    assert (joined[1] == -1).all()
    assert joined[2].tolist() == wide[0].tolist()


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (np.zeros((3, 2, 2), int), "routes are not of the shape"),
        ([RECORDED[0], RECORDED[0]], "routes of sequence 1 have the shape"),
        ([RECORDED[0], RECORDED[1][:, :1]], "routes of sequence 1 have the shape"),
        ([RECORDED[0] + 0.5, None], "expected integers"),
        ([RECORDED[0], RECORDED[1][0]], r"routes of sequence 1 have the shape \[2, 2\]"),
        ([RECORDED[0][0], None], r"routes of a sequence have the shape \[2, 2\]; expected integers"),
    ],
)
def test_routes_of_another_shape_are_refused(routes: Any, words: str) -> None:
    with pytest.raises(TreepackError, match=words):
        plan_batch([np.array(each) for each in SEQUENCES[:2]], routes=routes)


def test_experts_that_the_model_lacks_are_refused() -> None:
    wide = [np.where(each == 3, 7, each) for each in RECORDED]
    with pytest.raises(TreepackError, match="name expert 7"):
        tree_logprobs_like(mixture(), [np.array(each) for each in SEQUENCES], routes=wide)
