"""`plan_packing`, `pack_trie` and `PackOptions`: rows in memory are the rows on disk."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.manifests import manifest_of
from support.refusal import refusal
from support.strategies import make
from treepack import PackOptions, Progress, TreepackError, check, pack_trie, plan_packing, trajectories_from_arrays
from treepack.files.manifest import read_manifest
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows
from treepack.pack.row import Row
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import write_trie
from treepack.trie.trie import Trie


@pytest.fixture
def trie() -> Trie:
    return build_trie([make(f"t{i}", [1, 2, 3 + i % 3, 7, 8 + i]) for i in range(9)])


@pytest.fixture
def directory(trie: Trie, tmp_path: Path) -> Path:
    (tmp_path / "trie").mkdir()
    write_trie(trie, tmp_path / "trie")
    return tmp_path / "trie"


def same(a: Row, b: Row) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Row) if f.name != "terms")


def test_rows_in_memory_are_the_rows_on_disk(trie: Trie, directory: Path, tmp_path: Path) -> None:
    options = PackOptions(capacity=12, semantics="once", normalize="group")
    packing = plan_packing(trie, options)
    summary = pack_trie(directory, tmp_path / "packed", options)
    rows, written = list(packing), list(read_rows(tmp_path / "packed"))
    assert len(packing) == len(rows) == summary.totals["num_rows"] == len(written) > 1
    assert all(map(same, rows, written))
    assert summary.totals == packing.totals | manifest_of(rows, 12)["totals"]
    check_packed(rows, manifest_of(rows, 12, "once", "group"), trie)
    assert check(tmp_path / "packed")["against_trie"] is True


@pytest.mark.parametrize("workers", [1, 2])
def test_planning_reports_its_trees_and_their_share_of_the_work(workers: int) -> None:
    # 30 trees: one large and many small ones.
    trajectories = [make(f"t{i}", [0, 1, 2 + i % 5, 7, i]) for i in range(40)]
    trie = build_trie(trajectories + [make(f"s{i}", [i, 1, 2]) for i in range(1, 30)])
    states: list[Progress] = []
    plan_packing(trie, PackOptions(capacity=12, method="contiguous", workers=workers), progress=states.append)
    planning = [state for state in states if state.stage == "planning"]
    assert len(planning) > 5
    assert [state.done for state in planning] == sorted(state.done for state in planning)
    assert all(0 < (state.share or 0) <= 1 for state in planning)
    assert planning[-1] == Progress("planning", 30, 30, "trees", share=1.0)


def test_a_saved_plan_gives_the_same_rows(directory: Path, tmp_path: Path) -> None:
    calls: list[Progress] = []
    first = pack_trie(directory, tmp_path / "a", PackOptions(capacity=12), save_plan=tmp_path / "plan.jsonl")
    second = pack_trie(directory, tmp_path / "b", plan=tmp_path / "plan.jsonl", progress=calls.append)
    assert first.manifest["files"] == second.manifest["files"]
    assert second.manifest["options"].keys() == first.manifest["options"].keys() - {"effort", "time_limit"}
    assert (calls[-1].done, calls[-1].total) == (second.totals["num_rows"],) * 2


def test_a_plan_without_sharing_is_refused_if_shared_tokens_count_once(directory: Path, tmp_path: Path) -> None:
    flat = PackOptions(capacity=12, method="sequence")
    pack_trie(directory, tmp_path / "flat", flat, save_plan=tmp_path / "plan.jsonl")
    assert "semantics must be branch" in refusal(
        pack_trie, directory, tmp_path / "once", PackOptions(semantics="once"), plan=tmp_path / "plan.jsonl"
    )
    assert not (tmp_path / "once").exists()


def test_trajectories_that_are_too_long_are_counted(trie: Trie) -> None:
    longer = build_trie([make("long", [1] * 9), make("short", [1, 2])])
    packing = plan_packing(longer, PackOptions(capacity=5, too_long="drop"))
    assert packing.counts == {"dropped: longer than the capacity": 1}


@pytest.mark.parametrize(("length", "capacity"), [(5, 16_384), (16_385, 65_536), (70_000, 131_072)])
def test_without_a_capacity_rows_get_a_usual_length_that_every_trajectory_fits(length: int, capacity: int) -> None:
    trie = build_trie([make("long", [1] * length), make("short", [1, 2])])
    assert plan_packing(trie, PackOptions()).plan.capacity == capacity


def test_the_default_capacity_is_recorded_in_the_manifest(directory: Path, tmp_path: Path) -> None:
    pack_trie(directory, tmp_path / "packed")
    assert read_manifest(tmp_path / "packed")["capacity"] == 16_384


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "best"}, "method is 'best'; expected one of auto, contiguous"),
        ({"capacity": 0}, "capacity is 0; expected 1 to"),
        ({"capacity": 2**31}, "capacity is 2147483648; expected 1 to 2147483647"),
        ({"balance": 0}, "balance is 0; expected at least 1"),
        ({"time_limit": float("nan")}, "time_limit is nan; expected a positive number"),
        ({"method": "sequence", "semantics": "once"}, "semantics must be branch"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TreepackError, match=sentence):
        replace(PackOptions(capacity=8), **changes)


def test_arrays_become_the_rows_of_the_page() -> None:
    logprobs = [np.array([0, 0, -0.5, -1.0]), np.array([0, 0, -0.25, -2.0])]
    trajectories = trajectories_from_arrays(
        [[7, 8, 1, 2], np.array([7, 8, 3, 4])],
        [[1, 0, 1, 1], [0, 0, 0.5, 1]],
        group_ids=["g", "g"],
        rewards=[1.0, 0.0],
        advantages=[np.array([9, 9, 1, 2]), np.array([9, 9, 3, 4])],
        old_logprobs=logprobs,
    )
    (row,) = plan_packing(build_trie(trajectories), PackOptions(capacity=8))
    assert row.subtree_end.tolist() == [6, 6, 4, 4, 6, 6]
    assert row.loss_weight.tolist() == [0, 0, 1, 1, 0.5, 1]  # the first token is never trained
    assert row.terms is not None
    assert row.terms.advantage is not None
    assert row.terms.old_logprob is not None
    assert row.terms.advantage.tolist() == [1, 2, 3, 4]
    assert row.terms.old_logprob.tolist() == [-0.5, -1.0, -0.25, -2.0]
    assert row.trajectory_groups == ["g", "g"]


@pytest.mark.parametrize(
    ("ids", "mask", "values", "sentence"),
    [
        ([[1, 2]], [[0, 0]], {}, "trajectory 0: loss_mask trains no token"),
        ([[1, 2]], [[0]], {}, "trajectory 0: loss_mask has 1 values for 2 tokens"),
        ([[1, 2]], [], {}, "give one for each"),
        ([[1, 2], [3, 4]], [[0, 1]] * 2, {"rewards": [1.0]}, "2 input_ids and 1 rewards; give one for each"),
        ([[1, 2]], [[0, 1]], {"group_ids": ["a", "b"]}, "1 input_ids and 2 group_ids; give one for each"),
        ([[1, 2]], [[0, 1]], {"advantages": []}, "1 input_ids and 0 advantages; give one for each"),
        ([[1, 2]], [[0, 1]], {"rewards": 1.0}, "rewards is 1.0; give a list with one for each"),
        ([[1, 2], [3, -4]], [[0, 1], [0, 1]], {}, "trajectory 1: input_ids holds the id -4"),
        ([[1, 2]], [[0, 1]], {"old_logprobs": [[0.0]]}, "old_logprobs needs a finite value for each of the 2 tokens"),
        ([[1, 2]], [[0, 1]], {"sampling_logprobs": [[0, 0.5]]}, "sampling_logprobs is 0.5 at trained token 0"),
        ([[1, 2]], [[0, 1]], {"rewards": [float("nan")]}, "reward is nan"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    ids: list[list[int]], mask: list[list[float]], values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TreepackError, match=sentence):
        trajectories_from_arrays(ids, mask, **values)
