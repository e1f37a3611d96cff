"""The benchmark of rows in pieces: its trees, their rows, and a dry run on the CPU."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from carried_rows import comb, cut_rows, random_forks, row_of_columns
from hypothesis import given
from hypothesis import strategies as st
from training_rows import make_row
from workloads import Workload

import carry
from treepack.data.batch import Batch


def tokens_of(work: Workload) -> Batch:
    leaves = np.flatnonzero(work.subtree_end == np.arange(1, work.tokens + 1))
    return row_of_columns(0, np.arange(work.tokens), work.subtree_end, leaves, np.ones(work.tokens, bool))


def paths_of(row: Batch) -> list[list[int]]:
    found = []
    for end in row.trajectory_ends.tolist():
        path = []
        while end >= 0:
            path.append(int(row.input_ids[end]))
            end = int(row.parent[end])
        found.append(path[::-1])
    return found


TREES = st.one_of(
    st.builds(random_forks, st.just("forks"), st.integers(1, 12), st.integers(2, 40), st.integers(0, 99)),
    st.builds(comb, st.just("comb"), st.integers(20, 60), st.integers(1, 5), st.integers(1, 9)),
)


@given(TREES)
def test_columns_are_those_of_the_slow_way(work: Workload) -> None:
    row = tokens_of(work)
    slow = make_row(0, np.arange(work.tokens), work.subtree_end, row.trajectory_ends.numpy())
    for name in ("position_ids", "parent", "subtree_end", "scale", "loss_weight", "trajectory_ends"):
        assert torch.equal(getattr(row, name), getattr(slow, name)), name


@given(st.lists(TREES, min_size=1, max_size=3), st.integers(0, 60))
def test_rows_of_a_capacity_have_every_path_once(works: list[Workload], room: int) -> None:
    rows = [tokens_of(work) for work in works]
    capacity = max(int(row.position_ids.max()) + 1 for row in rows) + room
    cut = cut_rows(rows, capacity)
    assert all(row.num_tokens <= capacity for row in cut)
    assert sorted(path for row in cut for path in paths_of(row)) == sorted(
        path for row in rows for path in paths_of(row)
    )
    assert sum(row.total_weight for row in cut) == sum(row.total_weight for row in rows)


@given(st.lists(TREES, min_size=1, max_size=3))
def test_plans_of_a_file_make_the_same_rows(works: list[Workload]) -> None:
    rows = [tokens_of(work) for work in works]
    capacity = max(int(row.position_ids.max()) + 1 for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plans" / "trees.npz"
        planned, known = (cut_rows(rows, capacity, plans=file) for _ in range(2))
    assert [row.input_ids.tolist() for row in planned] == [row.input_ids.tolist() for row in known]
    assert [row.subtree_end.tolist() for row in planned] == [row.subtree_end.tolist() for row in known]


def test_sequences_that_no_row_holds_are_refused() -> None:
    with pytest.raises(SystemExit, match="a sequence has 40 tokens, and rows have 39"):
        cut_rows([tokens_of(random_forks("forks", 2, 40))], 39)


def test_a_dry_run_has_one_line_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    carry.main(["--dry-run", "--ways", "recomputed:50,offload:100,recomputed:50:1,carry:20"])
    text = capsys.readouterr().out.splitlines()
    names = ["recomputed:50", "offload:100", "recomputed:50:1", "carry:20"]
    # A line as soon as a step ends, so that a run which is stopped has printed its measurements.
    turns = [json.loads(line) for line in text if line.startswith("{")]
    assert [turn["way"] for turn in turns] == names
    assert all(turn["seconds"] > 0 and turn["compiled"] == [0, 0] for turn in turns)
    lines = [line.split("|") for line in text[-4:]]
    assert [line[2].strip() for line in lines] == names
    tokens = [[int(cell.replace(",", "")) for cell in line[4:6]] for line in lines]
    # Rows of a capacity repeat prefixes. Pieces run each token backward once, and trunk forward twice.
    assert tokens[0][0] == tokens[0][1] > tokens[3][1]
    assert tokens[3][0] > tokens[3][1]


@pytest.mark.slow
def test_a_run_follows_another_with_a_smaller_model_and_stops_before_its_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ways = ["--ways", "carry:20"]
    carry.main(["--dry-run", "--then", "--dry-run", "--divide", "3", *ways, "--then", "--dry-run", "--seconds", "0"])
    text = capsys.readouterr().out
    assert [size in text for size in ("3 layers, 300 words", "1 layers, 100 words")] == [True, True]
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()[-9:]]
    assert [cell[2] for cell in cells[:5]] == ["recomputed:50", "offload:100", "auto:50", "carry:20", "carry:20"]
    assert all(cell[6] == "no time" for cell in cells[5:])
