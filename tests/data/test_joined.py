"""Rows joined into one batch keep their tokens, trajectories and terms, and can be cut out again."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.oracle_model import Sample, make_row, sample_sets
from treepack.attention.reference import visible_pairs
from treepack.data.batch import Batch, TermTensors, make_batch
from treepack.data.joined import consecutive, join_rows, terms_of_row
from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw


def with_terms(batch: Batch, seed: int) -> Batch:
    """Return the row with random terms of every column; a token may have none or several."""
    generator = torch.Generator().manual_seed(seed)
    trained = batch.loss_weight.nonzero().squeeze(-1)
    trajectories = len(batch.trajectory_ends)
    index = torch.randint(max(1, len(trained)), (2 * len(trained),), generator=generator).int()
    columns: dict[str, Any] = {
        name: torch.randn(len(index), generator=generator, dtype=torch.float64)
        for name in ("weight", "advantage", "returns", "old_values", "edge_factor")
    }
    columns |= {
        name: torch.randn(len(index), generator=generator)
        for name in ("sampling_logprob", "old_logprob", "ref_logprob", "teacher_logprob")
    }
    terms = TermTensors(
        tokens=trained,
        index=index,
        trajectory=torch.randint(trajectories, (len(index),), generator=generator).int(),
        group=torch.randint(trajectories, (trajectories,), generator=generator).int(),
        reward=torch.randn(trajectories, generator=generator, dtype=torch.float64),
        temperature=torch.rand(len(trained), generator=generator),
        position=torch.arange(len(index), dtype=torch.int32),
        kept_ids=RaggedTensor(torch.arange(len(trained) * 2, dtype=torch.int32), torch.arange(len(trained) + 1) * 2),
        teacher=TeacherLaw(
            torch.randn(len(trained), 1 + seed % 3, generator=generator),
            torch.randint(9, (len(trained), 1 + seed % 3), generator=generator),
        ),
        rollout=torch.arange(trajectories, dtype=torch.int32) - (torch.arange(trajectories) == 1).int() * 2,
        **columns,
    )
    return replace(batch, terms=terms)


def batches_of(sets: list[list[Sample]], multiple: int) -> list[Batch]:
    rows = [make_row(samples, row_id=10 + number) for number, samples in enumerate(sets)]
    return [with_terms(make_batch(row, multiple=multiple), number) for number, row in enumerate(rows)]


@given(sets=st.lists(sample_sets(), min_size=1, max_size=4), own=st.integers(1, 9), multiple=st.integers(1, 9))
def test_joined_rows_are_the_rows_one_after_the_other(sets: list[list[Sample]], own: int, multiple: int) -> None:
    batches = batches_of(sets, own)
    joined = join_rows(batches, multiple=multiple)
    sizes = [batch.num_tokens for batch in batches]
    assert joined.num_tokens == sum(sizes)
    assert joined.total_weight == pytest.approx(sum(batch.total_weight for batch in batches))
    assert joined.tokens_flat == sum(batch.tokens_flat for batch in batches)
    assert joined.trajectory_ids == tuple(name for batch in batches for name in batch.trajectory_ids)
    if len(batches) > 1:
        assert len(joined.input_ids) % multiple == 0
        assert joined.row_ids == tuple(batch.row_id for batch in batches)
    # Each token of the joined batch sees the same tokens as in its row; a padding token sees itself.
    expected = torch.eye(len(joined.input_ids), dtype=torch.bool)
    begin = 0
    for batch, size in zip(batches, sizes, strict=True):
        own_pairs = visible_pairs(batch.subtree_end[None])[0, :size, :size]
        expected[begin : begin + size, begin : begin + size] = own_pairs
        for name in ("input_ids", "position_ids", "scale", "loss_weight"):
            assert torch.equal(getattr(joined, name)[begin : begin + size], getattr(batch, name)[:size])
        parent = batch.parent[:size]
        assert torch.equal(joined.parent[begin : begin + size], torch.where(parent < 0, -1, parent + begin))
        begin += size
    assert torch.equal(visible_pairs(joined.subtree_end[None])[0], expected)


@given(sets=st.lists(sample_sets(), min_size=2, max_size=4))
def test_the_terms_of_each_row_come_out_as_they_went_in(sets: list[list[Sample]]) -> None:
    batches = batches_of(sets, 1)
    joined = join_rows(batches)
    assert joined.edges is not None
    assert joined.terms is not None
    for number, batch in enumerate(batches):
        own, begin = terms_of_row(joined.terms, joined.edges, number), joined.edges.tokens[number]
        assert batch.terms is not None
        for field in fields(TermTensors):
            before, after = getattr(batch.terms, field.name), getattr(own, field.name)
            if field.name == "kept_ids":
                assert torch.equal(after.offsets, before.offsets)
                before, after = before.values, after.values
            if field.name == "teacher":
                known = before.values > -torch.inf  # joined laws have unused places
                width = known.shape[1]
                assert after.values.isfinite().sum(1).equal(known.sum(1))
                before, after = before.ids[known], after.ids[:, :width][known]
            if field.name == "tokens":
                before = before + begin
            elif field.name == "group":  # other codes, for the same groups
                before, after = (each[:, None] == each for each in (before, after))
            assert torch.equal(after, before), field.name


def test_groups_of_different_rows_stay_apart() -> None:
    batches = batches_of([[Sample((1, 2), (0.0, 1.0)), Sample((1, 3), (0.0, 1.0))]] * 2, 1)
    joined = join_rows(batches)
    assert joined.terms is not None
    first, second = joined.terms.group[:2].tolist(), joined.terms.group[2:].tolist()
    assert not {*first} & {*second}


def test_recorded_experts_are_joined_and_rows_without_them_have_none() -> None:
    sample = [Sample((1, 2), (0.0, 1.0))]
    one, two, three = batches_of([sample] * 3, 4)
    one = replace(one, routes=torch.tensor([[[3, 1]], [[2, 0]], [[255, 255]], [[255, 255]]], dtype=torch.uint8))
    three = replace(three, routes=torch.tensor([[[300, 1]], [[-1, -1]], [[-1, -1]], [[-1, -1]]], dtype=torch.int16))
    routes = join_rows([one, two, three], multiple=7).routes
    assert routes is not None
    assert routes.dtype == torch.int16
    assert routes[:, 0].tolist() == [[3, 1], [2, 0], [-1, -1], [-1, -1], [300, 1], [-1, -1], [-1, -1]]


@given(sizes=st.lists(st.integers(1, 12), max_size=20), limit=st.integers(1, 30))
def test_consecutive_rows_fill_a_pass_and_keep_their_order(sizes: list[int], limit: int) -> None:
    passes = list(consecutive(enumerate(sizes), lambda row: row[1], limit))
    assert [row for each in passes for row in each] == list(enumerate(sizes))
    totals = [sum(size for _, size in each) for each in passes]
    assert all(total <= limit or len(each) == 1 for total, each in zip(totals, passes, strict=True))
    assert all(total + following[0][1] > limit for total, following in zip(totals, passes[1:], strict=False))
