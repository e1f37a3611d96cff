"""Tries: every trajectory survives, tokens are stored once, order does not matter; on disk with any limits."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle, strategies
from support.refusal import refusal
from support.strategies import make
from treepack import BuildOptions, build_trie_directory
from treepack.files import parts as file_parts
from treepack.files.input_files import ranges
from treepack.ingest import stream
from treepack.ingest.read_log import ReadLog
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders import builder
from treepack.trie.builders import trie_parts as parts
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.builders.out_of_core import RUN_BYTES, run_size
from treepack.trie.check import check_trie
from treepack.trie.store import trie_files
from treepack.trie.trie import Trie, trajectories_of


def content(trajectory: Trajectory) -> Tokens:
    assert isinstance(trajectory.content, Tokens)
    return trajectory.content


def as_values(trajectory: Trajectory) -> dict[str, object]:
    """All fields of a trajectory, as values that can be compared."""
    tokens = content(trajectory)
    arrays = {name: getattr(tokens, name) for name in Tokens.__slots__}
    lists = {name: None if array is None else array.tolist() for name, array in arrays.items()}
    scalars = {name: getattr(trajectory, name) for name in ("trajectory_id", "source", "group_id", "step", "weight")}
    return lists | scalars | {"reward": trajectory.reward, "metadata": trajectory.metadata}


def same(a: Trie, b: Trie) -> bool:
    arrays = ("tokens", "node_start", "node_end", "parent", "depth", "num_passing", "end_node")
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays) and a.trajectories.equals(b.trajectories)


@given(strategies.trajectories())
def test_every_trajectory_comes_back_as_it_was(trajectories: list[Trajectory]) -> None:
    back = {trajectory.trajectory_id: trajectory for trajectory in trajectories_of(build_trie(trajectories))}
    assert {name: as_values(trajectory) for name, trajectory in back.items()} == {
        t.trajectory_id: as_values(t) for t in trajectories
    }


@given(strategies.sequences())
def test_tokens_are_stored_once(sequences: list[list[int]]) -> None:
    trie = build_trie([make(f"t{i}", tokens) for i, tokens in enumerate(sequences)])
    assert trie.tokens_tree == oracle.count_tokens(oracle.dict_trie(sequences))


@given(strategies.trajectories())
def test_a_built_trie_passes_its_check(trajectories: list[Trajectory]) -> None:
    check_trie(build_trie(trajectories))


@given(strategies.trajectories(), st.randoms(use_true_random=False))
def test_arrival_order_does_not_matter(trajectories: list[Trajectory], rng: random.Random) -> None:
    shuffled = trajectories.copy()
    rng.shuffle(shuffled)
    assert same(build_trie(trajectories), build_trie(shuffled))


@given(strategies.trajectories())
def test_num_passing_counts_trajectories_below(trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    ends = trie.end_node.tolist()
    counted = [sum(node <= end < stop for end in ends) for node, stop in enumerate(trie.node_end.tolist())]
    assert trie.num_passing.tolist() == counted


@given(strategies.trajectories(steps=True))
def test_trees_never_span_steps(trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    trees = trie.tree_id[trie.end_node].tolist()
    steps: dict[int, set[object]] = {}
    for tree, step in zip(trees, trie.trajectories["step"].to_pylist(), strict=True):
        steps.setdefault(tree, set()).add(step)
    assert all(len(values) == 1 for values in steps.values())


@given(strategies.trajectories())
def test_groups_keep_their_own_tries_when_asked(trajectories: list[Trajectory]) -> None:
    together = build_trie(trajectories, share="group")
    keys = {(t.step, t.group_id) for t in trajectories}
    apart = [build_trie([t for t in trajectories if (t.step, t.group_id) == key]) for key in keys]
    assert together.tokens_tree == sum(trie.tokens_tree for trie in apart)


def test_equal_ids_are_made_unique_by_their_source() -> None:
    a = Trajectory("x", "a.jsonl:1", make("x", [1, 2]).content, "g")
    b = Trajectory("x", "b.jsonl:1", make("x", [1, 3]).content, "g")
    ids = build_trie([a, b]).trajectories["trajectory_id"].to_pylist()
    assert ids == ["x@a.jsonl:1", "x@b.jsonl:1"]


@pytest.mark.parametrize("column", ["tree_id", "num_tokens", "trained", "advantages"])
def test_check_notices_damaged_columns(column: str) -> None:
    trie = build_trie([make("a", [1, 2], advantages=np.array([0.5])), make("b", [3, 4], advantages=np.array([1.0]))])
    check_trie(trie)
    field = trie.trajectories.schema.field(column)
    bad = {"trained": [[{"start": 0, "end": 9, "weight": 1.0}]] * 2, "advantages": [[1.0, 2.0]] * 2}
    values = pa.array(bad.get(column, [7, 7]), field.type)
    table = trie.trajectories.set_column(trie.trajectories.column_names.index(column), field, values)
    assert "build the trie again" in refusal(check_trie, replace(trie, trajectories=table))


def test_names_made_unique_never_collide() -> None:
    rollouts = [
        Trajectory(name, "f:1", make("x", [1, 2]).content, "g") for name in ("x", "x", "x@f:1", "x@f:1#2", "x@f:1")
    ]
    ids = build_trie(rollouts).trajectories["trajectory_id"].to_pylist()
    assert len(set(ids)) == 5


def test_no_trajectory_is_an_error() -> None:
    assert "no trajectory with a trained token was found" in refusal(build_trie, [])


def test_5000_nested_prefixes_need_no_recursion() -> None:
    chain = list(range(5001))
    trie = build_trie([make(f"t{n}", chain[: n + 1]) for n in range(1, 5001)])
    assert (trie.num_trajectories, trie.tokens_tree, trie.num_nodes) == (5000, 5001, 5000)


def test_a_node_of_500_000_tokens() -> None:
    trunk = list(range(500_000))
    trie = build_trie([make("a", [*trunk, 1]), make("b", [*trunk, 2])])
    assert trie.node_length.tolist() == [500_000, 1, 1]


def rollouts(count: int) -> list[dict[str, Any]]:
    """Rollouts with shared beginnings, equal tokens, equal ids, steps, and some that are skipped."""
    rng = random.Random(0)
    made: list[dict[str, Any]] = []
    for i in range(count):
        start = rng.choice(made)["input_ids"] if made and rng.random() < 0.7 else []
        ids = start[: rng.randrange(len(start) + 1)] + [rng.randrange(40) for _ in range(rng.randrange(1, 300))]
        if made and i % 11 == 0:
            ids = rng.choice(made)["input_ids"]
        mask = [0] * len(ids) if i % 13 == 0 else [0] + [1] * (len(ids) - 1)
        step = rng.choice([None, 1, 2])
        made.append({"id": f"r{i % 100}", "input_ids": ids, "loss_mask": mask, "group_id": f"g{i % 9}", "step": step})
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    made = rollouts(900)
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made[:450]))
    pq.write_table(pa.Table.from_pylist(made[450:]), folder / "b.parquet", row_group_size=50)
    (folder / "c.json").write_text(json.dumps(made[:20]))
    return folder


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranges, runs and parts. All of them are planned in the first process, so its values count."""
    for module, name, value in (
        (ranges, "GROUP_BYTES", 1),
        (stream, "MIN_BYTES", 1),
        (builder, "RUN_BYTES", 100_000),
        (builder, "MIN_RUN_BYTES", 20_000),
        (file_parts, "PART_TOKENS", 20_000),
        (parts, "PART_TOKENS", 20_000),
        (trie_files, "PART_TOKENS", 20_000),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize("share", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_workers_write_the_bytes_of_one_process(
    tmp_path: Path, inputs: Path, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(name: str, workers: int) -> ReadLog:
        return build_trie_directory([inputs], tmp_path / name, BuildOptions(share=share, workers=workers)).log

    logs = [build("workers", 2), build("runs", 1)]
    monkeypatch.setattr(builder, "RUN_BYTES", 1 << 27)
    logs.append(build("memory", 1))
    assert len(contents(tmp_path / "memory")) > 6
    assert contents(tmp_path / "memory") == contents(tmp_path / "runs") == contents(tmp_path / "workers")
    assert logs[0] == logs[1] == logs[2]
    assert logs[0].num_skipped > 10


@pytest.mark.usefixtures("small_sizes")
def test_the_first_error_in_order_is_raised_and_nothing_is_left(tmp_path: Path, inputs: Path) -> None:
    lines = (inputs / "a.jsonl").read_text().splitlines(keepends=True)
    lines[400] = '{"input_ids": [1, 2], "loss_mask": [1, 1, 1]}\n'
    lines[420] = "{broken\n"
    (inputs / "a.jsonl").write_text("".join(lines))
    assert "a.jsonl:401: loss_mask has 3 values for 2 tokens" in refusal(
        build_trie_directory, [inputs], tmp_path / "out" / "trie", BuildOptions(workers=2)
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small_sizes")
def test_a_worker_that_dies_in_the_merge_is_one_sentence_and_nothing_is_left(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_merge", die)
    assert "a worker process died" in refusal(
        build_trie_directory, [inputs], tmp_path / "out" / "trie", BuildOptions(workers=2)
    )
    assert not (tmp_path / "out").exists()


def die(worker: object, task: object) -> None:
    os._exit(1)


@pytest.mark.usefixtures("small_sizes")
def test_the_trie_does_not_depend_on_the_memory(tmp_path: Path, inputs: Path) -> None:
    for memory in (200_000, 1 << 40):
        build_trie_directory([inputs], tmp_path / str(memory), memory=memory)
    assert contents(tmp_path / "200000") == contents(tmp_path / str(1 << 40))


def test_runs_are_smaller_with_less_memory_and_have_a_maximum() -> None:
    assert [run_size(memory) for memory in (None, 1 << 40, 80, 1)] == [RUN_BYTES, RUN_BYTES, 10, 1]
