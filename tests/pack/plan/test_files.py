"""Plan files, budgets and ranks through the command line: files read back as written, and an error is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import strategies
from support.command_line import Run
from support.refusal import refusal
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.files import read_plan_file
from treepack.pack.plan.planning import plan_lines, plan_of_file, plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

HEADER = {"format": "treepack-plan", "version": 1, "capacity": 12}
IDS = [f"r{i}" for i in range(6)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trajectories=strategies.trajectories(max_count=12), capacity=st.integers(9, 24), pairs=st.none() | st.just(60))
def test_a_plan_reads_back_as_written(
    tmp_path: Path, trajectories: list[Trajectory], capacity: int, pairs: int | None
) -> None:
    trie = build_trie(trajectories)
    plan = plan_rows(trie, capacity=RowLimits(capacity, pairs))
    path = tmp_path / "plan.jsonl"
    path.write_text("\n".join(plan_lines(trie, plan, trie_sha256="x")))
    back = plan_of_file(trie, read_plan_file(path))
    assert back.row_of.tolist() == plan.row_of.tolist()
    assert (back.method, back.limits, back.multiple_of) == (plan.method, plan.limits, plan.multiple_of)
    assert back.lower_bound == plan.lower_bound
    check_plan(trie, back)


@pytest.fixture
def trie(treepack: Run, tmp_path: Path) -> Path:
    lines = [{"id": name, "input_ids": [5, 6, 7, i, i], "loss_mask": [0, 0, 1, 1, 1]} for i, name in enumerate(IDS)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie")[0] == 0
    return tmp_path / "trie"


def written(path: Path, *rows: object, **header: object) -> Path:
    lines = [HEADER | header, *({"trajectory_ids": row} if isinstance(row, list) else row for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def report_of(treepack: Run, packed: Path, *options: str) -> dict[str, object]:
    report: dict[str, object] = json.loads(treepack("stats", packed, "--json", *options)[1])
    return report


def test_rows_of_a_plan_of_ones_own_come_in_its_order(treepack: Run, trie: Path, tmp_path: Path) -> None:
    plan = written(tmp_path / "plan.jsonl", ["r5", "r0"], ["r1", "r2", "r4"], ["r3"])
    assert treepack("pack", trie, "--plan", plan, "--out", tmp_path / "p")[0] == 0
    report = report_of(treepack, tmp_path / "p", "--check")
    assert (report["num_rows"], report["tokens_packed"], report["capacity"]) == (3, 7 + 9 + 5, 12)
    assert isinstance(report["options"], dict)
    assert report["options"]["method"] == "given"


def test_a_saved_plan_packs_the_same_bytes(treepack: Run, trie: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.jsonl"
    planned = ("pack", trie, "--capacity", 10, "--save-plan", plan)
    assert treepack(*planned, "--out", tmp_path / "a")[0] == 0
    assert treepack("pack", trie, "--plan", plan, "--out", tmp_path / "b")[0] == 0
    first, second = ((tmp_path / name / "part-00000.parquet").read_bytes() for name in ("a", "b"))
    assert first == second
    status, _, err = treepack(*planned, "--out", tmp_path / "c")
    assert status == 1
    assert "plan.jsonl exists; choose another --save-plan or give --overwrite" in err
    assert treepack(*planned, "--out", tmp_path / "c", "--overwrite")[0] == 0


def test_saving_a_plan_spares_what_is_none(treepack: Run, trie: Path, tmp_path: Path) -> None:
    wrong = {
        tmp_path / "rollouts.jsonl": "was not written by treepack",
        tmp_path / "rollouts.jsonl" / "plan.jsonl": "cannot be written",
        trie / "manifest.json": "is or lies inside",
        tmp_path / "p": "is or lies inside",
    }
    for path, sentence in wrong.items():
        before = path.read_bytes() if path.is_file() else None
        options = ("--capacity", 10, "--out", tmp_path / "p", "--overwrite", "--save-plan", path)
        status, _, err = treepack("pack", trie, *options)
        assert (status, len(err.splitlines())) == (1, 1)
        assert sentence in err
        assert (path.read_bytes() if path.is_file() else None) == before
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("rows", "header", "sentence"),
    [
        ([IDS[:3], IDS[3:5]], {}, "trajectory r5 and 0 more are in no row; add them to rows"),
        ([IDS[:3], IDS[3:], ["x"]], {}, "jsonl:4: the trie has no trajectory 'x' to pack"),
        ([IDS[:3], IDS[2:]], {}, "jsonl:3: trajectory r2 is on line 2 too"),
        ([IDS], {}, "row 0 of the plan has 15 tokens, over the capacity of 12"),
        ([IDS[:3], IDS[3:]], {"pairs": 20}, "row 0 of the plan has 33 score pairs, over the budget of pairs, 20"),
        ([IDS[:3], IDS[3:]], {"terms": 8}, "row 0 of the plan has 9 loss terms, over the budget of terms, 8"),
        ([IDS[:3], IDS[3:]], {"multiple_of": 4}, "has 2 rows; expected a multiple of 4"),
        ([IDS[:3], IDS[3:]], {"lower_bound": 99}, "the plan has 18 tokens, below its lower_bound of 99"),
        ([IDS[:3], IDS[3:]], {"capacity": 4}, "trajectory r0 has 5 tokens, capacity is 4"),
        ([IDS[:3], IDS[3:]], {"capacity": "12"}, "jsonl:1: capacity is '12'; expected a positive integer"),
        ([IDS[:3], IDS[3:]], {"capacity": 2**31}, "jsonl:1: capacity is 2147483648; expected at most 2147483647"),
        ([IDS[:3], IDS[3:]], {"pairs": 10**30}, "expected at most 1000000000000000000"),
        ([IDS[:3], IDS[3:]], {"trie": "0"}, "was made for another trie"),
        ([IDS[:3], IDS[3:]], {"version": 2}, "jsonl:1: has version 2; this treepack reads version 1"),
        ([IDS[:3], IDS[3:]], {"format": "x"}, "jsonl:1: is not the header of a plan"),
        ([IDS[:3], IDS[3:]], {"rows": 2}, "jsonl:1: has the unknown key 'rows'"),
        ([IDS[:3], [], IDS[3:]], {}, "jsonl:3: is not a row"),
        ([IDS[:3], 5, IDS[3:]], {}, "jsonl:3: is not a JSON object"),
        ([], {}, "trajectory r0 and 5 more are in no row"),
    ],
)
def test_a_wrong_plan_is_one_sentence(
    treepack: Run, trie: Path, tmp_path: Path, rows: list[object], header: dict[str, object], sentence: str
) -> None:
    plan = written(tmp_path / "plan.jsonl", *rows, **header)
    status, out, err = treepack("pack", trie, "--plan", plan, "--out", tmp_path / "p")
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert sentence in err
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[1]\n", b"[" * 100_000])
def test_what_is_no_plan_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.jsonl").write_bytes(content)
    assert "plan.jsonl" in refusal(read_plan_file, tmp_path / "plan.jsonl")
    assert "cannot be read" in refusal(read_plan_file, tmp_path / "nowhere")


def test_a_plan_brings_its_own_options(treepack: Run, trie: Path, tmp_path: Path) -> None:
    plan = written(tmp_path / "plan.jsonl", IDS[:3], IDS[3:])
    for options in (("--capacity", 12), ("--method", "contiguous"), ("--balance", 2)):
        status, _, err = treepack("pack", trie, "--plan", plan, "--out", tmp_path / "p", *options)
        assert status == 2
        assert f"--plan gives the value of {options[0]}" in err


def test_budgets_and_ranks_are_kept_and_recorded(treepack: Run, trie: Path, tmp_path: Path) -> None:
    options = ("--capacity", 100, "--pairs-budget", 42, "--terms-budget", 12, "--balance", 3)
    status, out, _ = treepack("pack", trie, *options, "--out", tmp_path / "p")
    assert status == 0
    assert "group_pairs_max_over_mean" in out
    report = report_of(treepack, tmp_path / "p", "--check")
    chosen = {"pairs_budget": 42, "terms_budget": 12, "balance": 3}
    assert isinstance(report["options"], dict)
    assert {name: report["options"][name] for name in chosen} == chosen
    assert isinstance(report["row_pairs"], dict)
    assert (report["num_rows"], report["row_pairs"]["max"]) == (3, 24)
    assert report["pairs_max_over_mean"] == report["group_pairs_max_over_mean"] == 1
    assert treepack("stats", tmp_path / "p", "--verbose")[1].count("pairs_budget") == 1


def test_too_few_trajectories_for_the_ranks_is_one_sentence(treepack: Run, trie: Path, tmp_path: Path) -> None:
    status, _, err = treepack("pack", trie, "--capacity", 12, "--balance", 8, "--out", tmp_path / "p")
    assert status == 1
    assert "the input has 6 trajectories, too few for 8 rows, a multiple of 8" in err


def test_truncation_keeps_within_a_budget_of_pairs(treepack: Run, trie: Path, tmp_path: Path) -> None:
    options = ("--capacity", 12, "--pairs-budget", 14, "--out", tmp_path / "p")
    assert "score pairs, the budget of pairs is 14" in treepack("pack", trie, *options)[2]
    assert treepack("pack", trie, *options, "--too-long", "truncate")[0] == 0
    assert treepack("stats", tmp_path / "p", "--check")[0] == 0
