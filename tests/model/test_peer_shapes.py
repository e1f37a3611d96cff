"""The benchmark of published shapes: its trees and rows, and a dry run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peer_shapes
import pytest
from peer_trees import SHAPES, TINY_SHAPES, TurnTree, append_rows, flat_rows, tree_rows
from training_rows import count_work

from treepack.data.batch import Batch


def test_the_rows_of_turns_are_those_of_the_head_of_the_file() -> None:
    # prompt 4 -> a (2 and an answer of 2) -> b (1 and 3), c (an answer of 2)
    tree = TurnTree([-1, 0, 1, 1], [4, 2, 1, 0], [0, 2, 3, 2])
    rows = tree_rows(tree, 100)
    flat, append = flat_rows(tree, rows[0]), append_rows(tree, rows[0])
    assert rows[0].loss_weight.tolist() == [0] * 6 + [1, 1, 0, 1, 1, 1, 1, 1]
    assert rows[0].subtree_end.tolist() == [14] * 8 + [12] * 4 + [14] * 2
    assert [row.num_tokens for row in flat] == [12, 10, 8]
    assert [row.loss_weight.tolist() for row in append] == [
        [0] * 6 + [0.5, 0.5, 0, 1, 1, 1],
        [0] * 6 + [0.5, 0.5, 1, 1],
    ]
    assert append[1].input_ids.tolist() == rows[0].input_ids[[*range(8), 12, 13]].tolist()
    assert {sum(row.total_weight for row in each) for each in (rows, flat, append)} == {7.0}


@pytest.mark.parametrize("name", SHAPES)
def test_samples_of_a_shape_are_its_paths_and_lead_to_its_answers(name: str) -> None:
    tree = SHAPES[name].tree()
    work = tree.workload
    assert work.tokens == sum(tree.before) + sum(tree.answer)
    assert work.paths.tolist() == [sum(tree.before[i] + tree.answer[i] for i in tree.nodes_to(n)) for n in tree.samples]
    at = tree.path(tree.samples[-1])
    assert (np.diff(at) > 0).all()
    assert (work.subtree_end[at] >= at[-1] + 1).all()


def test_the_trees_have_the_tokens_that_their_authors_give() -> None:
    works = {name: shape.tree().workload for name, shape in SHAPES.items()}
    assert works["castform-64"].tokens_flat / works["castform-64"].tokens == pytest.approx(7.79, abs=0.01)
    assert works["dualkv-kernel"].tokens_flat == 28 * (16_384 + 2048)
    assert set(works["schedule-level"].paths) == {17_920}
    tree = SHAPES["toolbench"].tree()
    assert (len(tree.samples), len(tree.leaves)) == (74, 38)


def test_the_seconds_of_a_whole_model_count_its_ends_once() -> None:
    record = {"seconds": 3.0, "ends": 1.0, "layers": 2, "all_layers": 10}
    assert peer_shapes.whole_seconds(record) == 11.0


def test_what_the_budget_has_no_room_for_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        peer_shapes.main(["--dry-run", "--budget", "0", "--shapes", "star,turns"])
    assert not stopped.value.code
    assert capsys.readouterr().err.count("skipped, because about") == 4


@pytest.mark.slow
def test_a_dry_run_writes_every_way_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # It checks losses and gradients itself, in float32, and ends with 1 if they differ.
    path = tmp_path / "run.jsonl"
    with pytest.raises(SystemExit) as stopped:
        peer_shapes.main(["--dry-run", "--parts", "steps", "--shapes", "turns,hybrid", "--json", str(path)])
    assert not stopped.value.code
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["shape"], each["way"]) for each in records] == [
        ("turns", "tree"), ("turns", "flat"), ("turns", "append-only"), ("hybrid", "tree"), ("hybrid", "flat")
    ]  # fmt: skip
    table = capsys.readouterr().out
    assert table.count("| turns | qwen3-8b, 2 of 2 |") == 2
    peer_shapes.main(["--table", str(path)])
    assert capsys.readouterr().out == table
    assert all(TINY_SHAPES[each["shape"]].source in each["source"] for each in records)


@pytest.mark.slow
def test_rows_of_a_wrong_tree_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tree: TurnTree, row: Batch) -> list[Batch]:
        return flat_rows(tree._replace(answer=[0, 5, 5, 4]), row)

    monkeypatch.setattr(peer_shapes, "flat_rows", wrong)
    with pytest.raises(SystemExit) as stopped:
        peer_shapes.main(["--dry-run", "--parts", "steps", "--shapes", "star"])
    assert stopped.value.code


def test_counts_of_flat_rows_are_those_of_their_sequences() -> None:
    tree = TINY_SHAPES["search"].tree()
    rows = tree_rows(tree, 50)
    work = count_work(flat_rows(tree, rows[0]))
    lengths = tree.workload.paths
    assert (work.tokens, work.pairs) == (lengths.sum(), (lengths * (lengths + 1) // 2).sum())
    assert work.targets == count_work(rows).targets
