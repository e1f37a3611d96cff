"""`treepack allocate`: its tables and printed summaries, its errors, and the worked example of the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.command_line import Run
from support.paths import ROOT
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.research.trace.allocation import allocate_roots
from treepack.research.trace.expansion import prefix_table, root_table
from treepack.research.trace.predictions import correlations, read_predictions
from treepack.research.trace.targets import anchors, binary_rewards
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

# A and C get two rollouts each: 0.5 + 0.48 prompts of mixed outcomes, of 2.
ROOTS = """\
prompts                             3
rollouts                            4
prompts rolled out                  2
most rollouts of one                2
expected prompts of mixed outcomes  0.98
their share of those rolled out     49.0 %
"""
# Prefixes a after turn 1 and b after turn 1 get two continuations each: 0.75 + 0.51. Group C has no prefixes.
PREFIXES = """\
rollouts                           4
prefixes                           3
prefixes continued                 2
continuations                      4
groups without prefixes            1
further rollouts of their prompts  2
expected prefixes that flip        1.26
"""


def prefix(trajectory: str, turn: int, value: float, *, group: str = "A") -> dict[str, Any]:
    return {"group_id": group, "trajectory_id": trajectory, "turn": turn, "value": value}


EXAMPLE_ROOTS = [{"group_id": name, "value": value} for name, value in (("A", 0.5), ("B", 0.9), ("C", 0.4))]
EXAMPLE_PREFIXES = [prefix("a", 1, 0.5), prefix("a", 2, 0.9), prefix("b", 1, 0.3)]
# id, group, reward, tokens, mask
EXAMPLE_ROLLOUTS = [
    ("a", "A", 1, [7, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1]),
    ("b", "A", 0, [7, 6, 2, 8], [0, 1, 0, 1]),
    ("c", "C", 1, [9, 1], [0, 1]),
    ("d", "C", 1, [9, 2], [0, 1]),
]


def example() -> Trie:
    made = []
    for name, group, reward, tokens, mask in EXAMPLE_ROLLOUTS:
        spans = [(at, at + 1, 1.0) for at, trained in enumerate(mask) if trained]
        made.append(make(name, tokens, spans=spans, group=group, reward=float(reward)))
    return build_trie(made)


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    read = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_ndjson(path)
    return read.to_dicts()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_roots_writes_the_counts_of_every_prompt_by_id(treepack: Run, tmp_path: Path, suffix: str) -> None:
    predictions = lines(tmp_path / "predictions.jsonl", [*reversed(EXAMPLE_ROOTS), *EXAMPLE_PREFIXES])
    out = tmp_path / f"roots{suffix}"
    done = treepack("allocate", "roots", predictions, "--budget", 4, "--out", out)
    assert (done.status, done.notes, done.out) == (0, "", ROOTS)
    table = rows(out)
    assert [(row["group_id"], row["num_rollouts"]) for row in table] == [("A", 2), ("B", 0), ("C", 2)]
    assert [row["utility"] for row in table] == pytest.approx([0.5, 0.0, 0.48])
    refused = treepack("allocate", "roots", predictions, "--budget", 4, "--out", out)
    assert (refused.status, refused.err) == (1, f"treepack: {out} exists; choose another --out or give --overwrite\n")
    # With one unit more, the third rollout of A fits too.
    assert treepack("allocate", "roots", predictions, "--budget", 5, "--out", out, "--overwrite").status == 0
    assert [row["num_rollouts"] for row in rows(out)] == [3, 0, 2]
    most = ("--max-rollouts", 2, "--overwrite")
    assert treepack("allocate", "roots", predictions, "--budget", 6, "--out", out, *most).status == 0
    assert [row["num_rollouts"] for row in rows(out)] == [2, 2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.jsonl", out.name]


def test_a_prompt_can_bound_its_own_rollouts(tmp_path: Path) -> None:
    # 0: no rollouts of A; None: no limit for B; 3: at most three of C.
    bounded = [record | {"max_rollouts": most} for record, most in zip(EXAMPLE_ROOTS, (0, None, 3), strict=True)]
    table = root_table(read_predictions(lines(tmp_path / "p.jsonl", bounded)), budget=8)
    assert table["num_rollouts"].to_pylist() == [0, 5, 3]


def test_prefixes_writes_what_to_continue_from_where(treepack: Run, tmp_path: Path) -> None:
    fields = ("id", "group_id", "reward", "input_ids", "loss_mask")
    rollouts = [dict(zip(fields, rollout, strict=True)) for rollout in EXAMPLE_ROLLOUTS]
    built = treepack("build-trie", lines(tmp_path / "rollouts.jsonl", rollouts), "--out", tmp_path / "trie")
    assert built.status == 0
    predictions = tmp_path / "predictions.parquet"
    pl.DataFrame(EXAMPLE_PREFIXES).write_parquet(predictions)
    command = ("allocate", "prefixes", tmp_path / "trie", "--predictions", predictions, "--expand", 2, "--out")
    done = treepack(*command, tmp_path / "prefixes.jsonl")
    assert (done.status, done.notes, done.out) == (0, "", PREFIXES)
    table = rows(tmp_path / "prefixes.jsonl")
    assert [tuple(row.values())[:5] for row in table] == [
        ("A", None, "a", 1, 3),
        ("A", None, "b", 1, 3),
        ("C", None, None, None, None),
    ]
    assert [row["num_continuations"] for row in table] == [2, 2, 2]
    assert [row["utility"] for row in table] == pytest.approx([0.75, 0.51, None])
    assert [row["reward"] for row in table] == [1.0, 0.0, None]
    assert treepack(*command, tmp_path / "prefixes.parquet").status == 0
    assert rows(tmp_path / "prefixes.parquet") == table


MISMATCHED: list[tuple[list[dict[str, Any]], str]] = [
    (EXAMPLE_PREFIXES[:1], "2 of the trie's 3 prefixes have no value, the first is turn 2 of trajectory 'a'; predict"),
    (
        [*EXAMPLE_PREFIXES, prefix("b", 2, 0.1)],
        "1 of 4 values belong to prefixes that the trie does not have, the first",
    ),
    ([*EXAMPLE_PREFIXES, prefix("z", 1, 0.1)], "the first is turn 1 of trajectory 'z'; predict on this trie, with"),
    ([*EXAMPLE_PREFIXES[:2], prefix("b", 1, 0.3, group="C")], "trajectory 'b' has the group 'C' there and 'A' in"),
]


@pytest.mark.parametrize(("records", "message"), MISMATCHED)
def test_predictions_of_another_trie_are_refused(tmp_path: Path, records: list[dict[str, Any]], message: str) -> None:
    path = lines(tmp_path / "p.jsonl", records)
    with pytest.raises(TreepackError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        prefix_table(example(), read_predictions(path), expand=1)


@pytest.mark.parametrize("name", ["group_id", "uid", "task_id"])
def test_a_prompt_is_named_by_any_field_that_names_a_group(tmp_path: Path, name: str) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({name: "A", "value": 0.5}) + "\n")
    assert read_predictions(tmp_path / "p.jsonl").group_ids == ["A"]


def test_turns_may_be_floats_as_pandas_writes_columns_with_missing_integers(tmp_path: Path) -> None:
    records = [{"group_id": "A", "trajectory_id": None, "turn": None, "value": 0.5}, *EXAMPLE_PREFIXES]
    pl.DataFrame(records).with_columns(pl.col("turn").cast(pl.Float64)).write_parquet(tmp_path / "p.parquet")
    predictions = read_predictions(tmp_path / "p.parquet")
    assert predictions.group_ids == ["A"]
    assert sorted(predictions.prefix_value) == [("a", 1), ("a", 2), ("b", 1)]


def test_more_continuations_than_can_be_spent_are_refused(tmp_path: Path) -> None:
    predictions = read_predictions(lines(tmp_path / "p.jsonl", EXAMPLE_PREFIXES))
    assert "continuations for each rollout are more than 1,000,000,000 in total; give" in refusal(
        prefix_table, example(), predictions, expand=10**9
    )


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"group_id": "A"}, "value is null; expected a chance of success in 0 .. 1"),
    ({"group_id": "A", "value": 1.5}, "value is 1.5; expected a chance"),
    ({"group_id": "A", "value": True}, "value is true; expected a chance"),
    ({"group_id": "A", "value": float("nan")}, "value is NaN; expected a chance"),
    ({"value": 0.5}, "group_id is null; expected an id"),
    ({"group_id": "A", "value": 0.5, "max_rollouts": -1}, "max_rollouts is -1; expected an integer of at least 0"),
    ({"group_id": "A", "trajectory_id": "a", "value": 0.5}, "turn is null; expected an integer of at least 1"),
    ({"group_id": "A", "trajectory_id": "a", "turn": 0, "value": 0.5}, "turn is 0; expected an integer of at least 1"),
    ({"group_id": "A", "turn": 2, "value": 0.5}, "trajectory_id is null; expected an id"),
    ({"group_id": "B", "value": 0.5}, "an earlier line has the same prompt or prefix; keep one of them"),
]


@pytest.mark.parametrize(("record", "message"), MALFORMED)
def test_a_malformed_prediction_is_named_by_its_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = lines(tmp_path / "p.jsonl", [{"group_id": "B", "value": 0.5}, record])
    assert refusal(read_predictions, path).startswith(f"{f'{path}:2: {message}'}")


def test_what_nothing_was_predicted_for_is_left_out_and_counted(tmp_path: Path) -> None:
    records = [*EXAMPLE_ROOTS[:1], EXAMPLE_PREFIXES[1], prefix("z", 1, 0.2)]
    levels = correlations(
        read_predictions(lines(tmp_path / "p.jsonl", records)), example(), anchors(example()), binary_rewards(example())
    )
    counts = {name: (level.num_pairs, level.num_unpredicted) for name, level in levels.items()}
    assert counts == {"root": (1, 1), "prefix": (1, 2), "shared prefix": (0, 0)}


STRANGE: list[tuple[list[dict[str, Any]], str]] = [
    ([{"group_id": "Z", "value": 0.5}], "predicts none of the trie's 2 groups; predict on its rollouts, with the same"),
    ([prefix("z", 1, 0.5)], "predicts none of the trie's 3 prefixes; predict on its rollouts, with the same --segment"),
    ([prefix("b", 1, 0.3, group="C")], "trajectory 'b' has the group 'C' there and 'A' in the trie; predict on this"),
]


@pytest.mark.parametrize(("records", "message"), STRANGE)
def test_predictions_of_other_rollouts_cannot_be_judged(
    tmp_path: Path, records: list[dict[str, Any]], message: str
) -> None:
    path = lines(tmp_path / "p.jsonl", records)
    assert refusal(
        correlations, read_predictions(path), example(), anchors(example()), binary_rewards(example())
    ).startswith(f"{f'{path}: {message}'}")


def test_a_group_of_several_steps_has_no_single_value(tmp_path: Path) -> None:
    predictions = read_predictions(lines(tmp_path / "p.jsonl", EXAMPLE_ROOTS[:2]))
    twice = build_trie([make(f"t{i}", [7, i], group="A", step=i, reward=1.0) for i in range(2)])
    assert "one value per group_id and the trie has several training steps of one" in refusal(
        correlations, predictions, twice, anchors(twice), binary_rewards(twice)
    )


def test_what_cannot_be_allocated_is_one_sentence(treepack: Run, tmp_path: Path) -> None:
    predictions = lines(tmp_path / "p.jsonl", EXAMPLE_ROOTS)
    empty = lines(tmp_path / "none.jsonl", EXAMPLE_PREFIXES)
    cases = [
        (predictions, 1, "roots.jsonl", "a budget of 1 is too small for one group; give at least 2 rollouts"),
        (predictions, 4, "roots.csv", "its name must end in .jsonl or .parquet, which selects the format"),
        (empty, 4, "roots.jsonl", "predicts no prompt; add lines without trajectory_id"),
        (predictions, 4, predictions.name, "is or lies inside the input"),
        (tmp_path / "nowhere", 4, "roots.jsonl", "cannot be read (No such file or directory)"),
    ]
    for path, budget, out, message in cases:
        done = treepack("allocate", "roots", path, "--budget", budget, "--out", tmp_path / out)
        assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
        assert message in done.err
        assert path == tmp_path / out or not (tmp_path / out).exists()


def test_the_worked_example_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tree-rl.md").read_text().partition("\n## Allocation")[2].partition("\n## ")[0]
    table = root_table(read_predictions(lines(tmp_path / "r.jsonl", EXAMPLE_ROOTS)), budget=4).to_pydict()
    shown = re.findall(r"^\| `(\w)` \| ([\d.]+) \| [^|]*\| (\d) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [(name, float(value), int(count)) for name, value, count, _ in shown] == list(
        zip(table["group_id"], table["value"], table["num_rollouts"], strict=True)
    )
    assert [float(utility) for *_, utility in shown] == pytest.approx(table["utility"], abs=1e-12)
    prefixes, _ = prefix_table(example(), read_predictions(lines(tmp_path / "p.jsonl", EXAMPLE_PREFIXES)), expand=2)
    counts = {(row["trajectory_id"], row["turn"]): row["num_continuations"] for row in prefixes.to_pylist()}
    shown = re.findall(r"^\| `(\w)` after turn (\d) \| ([\d.]+) \| (\d) \| [^|]*\| (\d) \|$", page, re.MULTILINE)
    expected = [(r["trajectory_id"], str(r["turn"]), r["value"]) for r in EXAMPLE_PREFIXES]
    assert [(name, turn, float(value)) for name, turn, value, _, _ in shown] == expected
    assert [int(count) for *_, count in shown] == [counts.get((name, int(turn)), 0) for name, turn, *_ in shown]
    assert allocate_roots(read_predictions(tmp_path / "r.jsonl").root_value, 5).tolist() == [3, 0, 2]
