"""The words of a teacher in rows: every term has those of its trajectory's token, also in files and batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import strategies
from support.manifests import manifest_of
from treepack.data.batch import make_batch
from treepack.data.joined import join_rows, terms_of_row
from treepack.errors import TreepackError
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.ragged import RaggedArray
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import trajectories_of


@st.composite
def taught(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories whose trained tokens have up to three words of a teacher, or which have none at all."""
    return [draw(_one(item)) for item in draw(strategies.trajectories(max_count=4))]


@st.composite
def _one(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    content = item.content
    assert isinstance(content, Tokens)
    if not draw(st.booleans()) or not content.num_trained:
        return item
    sizes = draw(st.lists(st.integers(1, 3), min_size=content.num_trained, max_size=content.num_trained))
    ids = RaggedArray.of([range(10, 10 + size) for size in sizes], np.int32)
    seeds = draw(st.lists(st.integers(0, 5), min_size=len(ids.flat), max_size=len(ids.flat)))
    logprobs = RaggedArray(np.array([-0.5 - seed for seed in seeds], np.float32), ids.offsets)
    own = np.linspace(-3, -1, content.num_trained, dtype=np.float32)
    content = replace(content, teacher_topk_ids=ids, teacher_topk_logprobs=logprobs, teacher_logprobs=own)
    return replace(item, content=content)


def packed(rollouts: list[Trajectory]) -> list[Row]:
    trie = build_trie(rollouts)
    return list(pack_rows(trie, plan_rows(trie, capacity=40, method="contiguous")))


@given(taught())
def test_words_come_out_of_tries_files_and_batches_as_they_went_in(rollouts: list[Trajectory]) -> None:
    again = {item.trajectory_id: item for item in trajectories_of(build_trie(rollouts))}
    for before, after in ((item, again[item.trajectory_id]) for item in rollouts):
        assert isinstance(before.content, Tokens)
        assert isinstance(after.content, Tokens)
        for name in ("teacher_topk_ids", "teacher_topk_logprobs"):
            known, found = getattr(before.content, name), getattr(after.content, name)
            assert (found is None or not len(found.flat)) if known is None else found.equals(known)
    rows = packed(rollouts)
    check_packed(rows, manifest_of(rows, 40), build_trie(rollouts))
    by_name = {item.trajectory_id: item.content for item in rollouts}
    batches = [make_batch(row) for row in rows]
    for row, batch in zip(rows, batches, strict=True):
        if row.terms is None:
            continue
        assert batch.terms is not None
        law = batch.terms.teacher
        for i, name in enumerate(row.trajectory_ids):
            content, mine = by_name[name], (batch.terms.trajectory == i).nonzero().squeeze(-1)
            assert isinstance(content, Tokens)
            if content.teacher_topk_ids is None or content.teacher_topk_logprobs is None:
                continue
            assert law is not None
            assert law.ids is not None
            for j, place in enumerate(batch.terms.index[mine].tolist()):
                used = law.values[place] > -torch.inf
                assert law.ids[place, used].tolist() == content.teacher_topk_ids.list(j).tolist()
                assert law.values[place, used].tolist() == content.teacher_topk_logprobs.list(j).tolist()
    if len(batches) > 1 and all(b.terms is not None and b.terms.teacher is not None for b in batches):
        joined = join_rows(batches)
        assert joined.terms is not None
        assert joined.edges is not None
        own = terms_of_row(joined.terms, joined.edges, 1).teacher
        assert own is not None
        assert batches[1].terms is not None
        assert len(own) == len(batches[1].terms.tokens)


def row_of(ids: RaggedArray, logprobs: RaggedArray) -> list[Row]:
    columns: dict[str, Any] = {"teacher_topk_ids": ids, "teacher_topk_logprobs": logprobs}
    return packed([strategies.make("a", [1, 2, 3], reward=1.0, **columns)])


def test_lists_of_other_lengths_are_refused(tmp_path: Path) -> None:
    ids, logprobs = RaggedArray.of([[4, 5], [6]], np.int32), RaggedArray.of([[-1.0, -2.0], [-1.0]], np.float32)
    rows = row_of(ids, logprobs)
    write_packed(rows, tmp_path, capacity=40)
    (again,) = read_rows(tmp_path)
    assert again.terms is not None
    assert again.terms.teacher_topk_logprobs is not None
    assert again.terms.teacher_topk_logprobs.equals(logprobs)
    wrong = row_of(ids, RaggedArray.of([[-1.0], [-1.0]], np.float32))
    with pytest.raises(TreepackError, match="differ in length"):
        check_packed(wrong, manifest_of(wrong, 40), None)
