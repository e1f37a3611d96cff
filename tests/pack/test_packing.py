"""`plan_packing`, `pack_trie` and `PackOptions`: rows in memory are the rows on disk, also within a limit of memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support import strategies
from support.command_line import Run
from support.manifests import manifest_of
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack import PackOptions, Progress, TreepackError, check, pack_trie, plan_packing, trajectories_from_arrays
from treepack.files.manifest import read_manifest
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows
from treepack.pack.options import NORMALIZE
from treepack.pack.row import Row
from treepack.sequences import as_columns, with_unique_ids
from treepack.trajectory import Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie, with_places
from treepack.trie.store.trie_files import read_trie, write_trie
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


METHODS = ("contiguous", "auto", "heuristic", "single-path", "greedy-online", "sequence", "groups")


def as_values(row: Row) -> list[Any]:
    """All columns of a row, with NaN as a value that equals itself."""
    terms = row.terms
    columns = [getattr(row, name) for name in Row.__slots__ if name != "terms"]
    columns += [] if terms is None else [getattr(terms, name) for name in type(terms).__slots__]
    return [(each.dtype, each.tobytes()) if isinstance(each, np.ndarray) else each for each in columns]


def with_values(rollouts: list[Trajectory]) -> list[Trajectory]:
    """Every third rollout has advantages and log-probabilities, every third one an advantage and a temperature."""
    changed = []
    for i, each in enumerate(rollouts):
        assert isinstance(each.content, Tokens)
        count = int((each.content.ends - each.content.starts).sum())
        values: dict[str, Any] = {
            "advantage": np.arange(count) / 7,
            "old_logprob": np.arange(count, dtype=np.float32),
        }
        content = replace(each.content, **values) if i % 3 == 0 else each.content
        scalars: dict[str, Any] = {"advantage": i / 3, "temperature": 0.5} if i % 3 == 1 else {}
        changed.append(replace(each, content=content, **scalars))
    return changed


# All examples share one tmp_path; each overwrites the trie of the one before.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strategies.trajectories(),
    st.sampled_from(METHODS),
    st.sampled_from(NORMALIZE),
    st.sampled_from(["error", "drop", "truncate"]),
    st.booleans(),
)
@example([make("a", [1, 2, 3]), make("b", [1, 2, 4])], "sequence", "group", "truncate", True)
@example([make("a", [1, 2, 3]), make("b", [1, 2, 4])], "contiguous", "token", "error", True)
def test_rows_of_a_mapped_trie_are_those_of_the_trie_in_memory(
    tmp_path: Path, rollouts: list[Trajectory], method: str, normalize: str, too_long: str, once: bool
) -> None:
    directory = saved(build_trie(with_values(rollouts)), tmp_path / "trie")
    options = PackOptions(
        capacity=80 if too_long == "error" else 6,
        method=method,
        effort="low",
        normalize=normalize,
        too_long=too_long,
        semantics="once" if once and method != "sequence" else "branch",
    )
    results: list[list[Any]] = []
    for memory in (1, 1 << 40):
        trie = read_trie(directory, memory=memory)
        assert bool(trie.storage.maps) == (memory == 1)
        try:
            packing = plan_packing(trie, options)
        except TreepackError as error:  # a group that is larger than a row, or no trajectory that fits
            results.append([str(error)])
            continue
        assert bool(packing.trie.storage.maps) == (memory == 1)
        results.append([packing.totals, packing.counts, *map(as_values, packing)])
    assert results[0] == results[1]


def branching(count: int, length: int) -> list[Trajectory]:
    """Groups of eight rollouts that share a quarter of their tokens, sampled by weights of leaves."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        if i % 8 == 0:
            prompt = rng.integers(0, 1000, length // 4)
        tokens = [*prompt.tolist(), *rng.integers(0, 1000, length - length // 4 - i % 5).tolist()]
        recorded = {
            "leaf_weight": 0.25 if i % 8 < 4 else 0.0,
            "leaf_weight_before_fallback": 0.25 if i % 8 < 4 else 0.0,
        }
        made.append(make(f"t{i}", tokens, group=f"g{i // 8}", reward=float(i % 3), metadata=recorded))
    return made


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    trie = build_trie(branching(48, 20))
    with pytest.raises(TreepackError, match=r"^packing 48 trajectories with \d+ nodes needs about 1 MB of memory"):
        plan_packing(trie, PackOptions(), memory=1000)
    saved(trie, tmp_path / "trie")
    with pytest.raises(TreepackError, match=r"give --memory 1M, or --partitions \d+ or more$"):
        pack_trie(tmp_path / "trie", tmp_path / "out", memory=1000)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_the_memory(treepack: Run, tmp_path: Path) -> None:
    saved(build_trie(branching(16, 40)), tmp_path / "trie")
    refused = treepack("pack", str(tmp_path / "trie"), "--out", str(tmp_path / "out"), "--memory", "1K")
    assert refused.status == 1
    assert "--memory 1M" in refused.err
    treepack("pack", str(tmp_path / "trie"), "--out", str(tmp_path / "small"), "--memory", "1M")
    treepack("pack", str(tmp_path / "trie"), "--out", str(tmp_path / "large"), "--memory", "8G")
    assert contents(tmp_path / "small") == contents(tmp_path / "large")


def long_trie(num_trajectories: int, length: int) -> Trie:
    """Trajectories that share nothing, without a Python object for each of their tokens."""
    trained = np.array([length // 2], np.int32), np.array([length], np.int32), np.ones(1)
    made = [
        Trajectory(f"t{i:05}", "made", Tokens(np.zeros(length, np.int32), *trained)) for i in range(num_trajectories)
    ]
    each: Int32 = np.arange(num_trajectories, dtype=np.int32)
    return Trie(
        tokens=np.random.default_rng(0).integers(0, 1000, num_trajectories * length, dtype=np.int32),
        node_start=np.arange(num_trajectories + 1, dtype=np.int64) * length,
        node_end=each + np.int32(1),
        parent=np.full_like(each, -1),
        depth=np.zeros(num_trajectories, np.int64),
        num_passing=np.ones_like(each),
        end_node=each,
        trajectories=with_places(with_unique_ids(as_columns(made)).table, each, each),
        share="all",
    )


@pytest.mark.parametrize(("method", "semantics"), [("contiguous", "once"), ("sequence", "branch")])
def test_arrays_in_memory_do_not_grow_with_the_tokens(tmp_path: Path, method: str, semantics: str) -> None:
    def peak(num_trajectories: int, memory: int) -> int:
        directory = saved(long_trie(num_trajectories, 4096), tmp_path / "trie")
        tracemalloc.start()
        trie = read_trie(directory, memory=memory)
        packing = plan_packing(trie, PackOptions(capacity=8192, method=method, semantics=semantics))
        assert sum(row.num_tokens for row in packing) == num_trajectories * 4096
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # 160 trajectories more are 2.6 MB of tokens, and as much for each array of a value per token.
    assert peak(200, 1 << 20) - peak(40, 1 << 20) < 1 << 19
    assert peak(200, 1 << 40) - peak(40, 1 << 40) > 1 << 22
