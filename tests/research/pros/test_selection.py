"""Selection: the counts of a state, its file, the queries nearest to 0.5, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command_line import Run
from support.paths import ROOT
from support.refusal import refusal
from support.strategies import make
from support.trie_files import saved
from treepack.files import schema
from treepack.files.directory import finished_directory
from treepack.research.pros import selection
from treepack.research.pros.options import OddsPrior
from treepack.research.pros.pass_rates import conditional
from treepack.research.pros.selection import empty_state, forget_and_add, nearest, read_state, with_queries, write_state
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import write_trie


def state_of(
    parents: dict[str, str | None], counts: dict[str, tuple[float, float]] | None = None
) -> selection.QueryCounts:
    state, _ = with_queries(empty_state(), list(parents), list(parents.values()))
    pairs = [(counts or {}).get(name, (0.0, 0.0)) for name in state.query_id.to_pylist()]
    return replace(state, passed=np.array([p for p, _ in pairs]), tried=np.array([t for _, t in pairs]))


# Query and parent: two original queries, two derived from q.
POOL: dict[str, str | None] = {"q": None, "q~1": "q", "q~2": "q", "a": None}


def test_queries_join_with_nothing_tried_and_leave_the_others_as_they_are() -> None:
    state = state_of(POOL, {"q": (1.0, 3.0), "q~2": (2.0, 2.0)})
    grown, added = with_queries(state, ["q~0", "q", "b", "q~0"], ["q", None, None, "q"])
    assert added == 2
    assert grown.query_id.to_pylist() == ["a", "b", "q", "q~0", "q~1", "q~2"]
    assert grown.parent_id.to_pylist() == [None, None, None, "q", "q", "q"]
    assert grown.passed.tolist() == [0, 0, 1, 0, 0, 2]
    assert grown.tried.tolist() == [0, 0, 3, 0, 0, 2]


@given(
    forgetting=st.sampled_from([0.5, 0.9, 1.0]),
    rollouts=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12),
)
def test_counts_are_those_of_forgetting_and_adding_step_by_step(
    forgetting: float, rollouts: list[tuple[int, bool, int]]
) -> None:
    state = state_of(POOL, {"q": (1.0, 3.0), "q~2": (2.0, 2.0)})
    passed, tried = state.passed.copy(), state.tried.copy()
    # Steps may have gaps, for example 0 and 2: ranks are 0 and 1, and a step without rollouts forgets nothing.
    ranks = sorted({step for _, _, step in rollouts})
    for rank in ranks:
        passed, tried = passed * forgetting, tried * forgetting
        for query, success, step in rollouts:
            if step == rank:
                tried[query] += 1
                passed[query] += success
    queries, successes = (
        np.array([query for query, _, _ in rollouts]),
        np.array([success for _, success, _ in rollouts]),
    )
    step_ranks = np.array([ranks.index(step) for _, _, step in rollouts])
    result = forget_and_add(state, queries, successes, step=step_ranks, forgetting=forgetting)
    np.testing.assert_allclose(result.passed, passed, rtol=1e-12)
    np.testing.assert_allclose(result.tried, tried, rtol=1e-12)
    assert result.num_updates == len(ranks)
    assert (result.passed <= result.tried).all()


def test_what_has_almost_been_forgotten_is_forgotten() -> None:
    # 0.5^21 is below the limit of 1e-6. The counts of r approach 1 / (1 - 0.5) = 2.
    state = state_of({"q": None, "r": None}, {"q": (1.0, 1.0)})
    for _ in range(21):
        state = forget_and_add(state, np.array([1]), np.array([True]), forgetting=0.5)
    assert (state.tried[0], state.passed[0]) == (0.0, 0.0)
    np.testing.assert_allclose(state.tried[1], 2.0, rtol=1e-5)


def test_the_nearest_queries_are_those_of_least_log_odds_and_equals_are_drawn_by_the_seed() -> None:
    log_odds = np.array([3.0, -0.2, 0.1, -5.0, 0.2, 0.0])
    assert nearest(log_odds, 3).tolist() == [5, 2, *nearest(log_odds, 3).tolist()[2:]]
    # Equal queries: 20 seeds choose more than ten different ones of 50.
    firsts = {nearest(np.zeros(50), 1, seed=seed).item() for seed in range(20)}
    assert len(firsts) > 10
    assert nearest(np.zeros(50), 50, seed=3).tolist() == nearest(np.zeros(50), 50, seed=3).tolist()
    assert sorted(nearest(np.zeros(50), 50).tolist()) == list(range(50))


def test_a_state_comes_back_from_its_file_and_equal_states_have_equal_files(tmp_path: Path) -> None:
    state = state_of(POOL, {"q": (1.25, 3.5)})
    for name in ("one", "two"):
        write_state(replace(state, num_updates=4), tmp_path / name)
    copy = read_state(tmp_path / "one")
    assert (copy.num_updates, copy.parent.tolist()) == (4, state.parent.tolist())
    assert copy.query_id.to_pylist() == state.query_id.to_pylist()
    assert (copy.passed.tolist(), copy.tried.tolist()) == (state.passed.tolist(), state.tried.tolist())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    write_state(empty_state(), tmp_path / "none")
    assert read_state(tmp_path / "none").num_queries == 0


def test_the_columns_of_a_state_are_those_of_its_schema(tmp_path: Path) -> None:
    write_state(empty_state(), tmp_path / "state")
    written = pq.read_schema(tmp_path / "state")
    assert written.equals(schema.QUERIES)
    assert schema.schema_as_json(written) == schema.schema_as_json(schema.QUERIES)
    about = json.loads((written.metadata or {})[b"treepack"])
    assert about == {"format": "treepack-selection", "version": 1, "num_updates": 0}


def damaged_file(path: Path, **columns: Any) -> Path:
    """Write a state file of the queries a and b with some columns replaced."""
    good = {"query_id": ["a", "b"], "parent_id": [None, "a"], "passed": [0.0, 1.0], "tried": [0.0, 1.0]}
    about = {"format": "treepack-selection", "version": 1, "num_updates": 1} | columns.pop("about", {})
    arrays = {name: pa.array(values, schema.QUERIES.field(name).type) for name, values in {**good, **columns}.items()}
    table = pa.table(arrays).replace_schema_metadata({"treepack": json.dumps(about)})
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"about": {"version": 2}}, "has treepack-selection version 2; this treepack reads version 1, so use the"),
        ({"about": {"format": "x"}}, "is not a state of treepack select; make one with treepack select update"),
        ({"query_id": ["a", "a"]}, "is damaged (a query is there twice); make it again with"),
        ({"passed": [0.0, 2.0]}, "is damaged (counts are not 0 <= passed <= tried); make it again with"),
        ({"passed": [0.0, float("nan")]}, "is damaged (counts are not 0 <= passed <= tried); make it again with"),
        ({"parent_id": [None, "z"]}, "is damaged (a parent is missing); make it again with"),
        ({"parent_id": ["b", "a"]}, "is damaged (a parent is derived itself); make it again with"),
    ],
)
def test_states_that_cannot_be_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = damaged_file(tmp_path / "state", **columns)
    assert f"{path}: {message}" in refusal(read_state, path)
    assert read_state(damaged_file(tmp_path / "good")).num_queries == 2


def test_files_that_are_no_state_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no Parquet")
    pq.write_table(pa.table({"query_id": ["a"]}), tmp_path / "other")
    for name in ("text", "other"):
        assert "is not a state of treepack select" in refusal(read_state, tmp_path / name)
    assert "missing: no such file; make a state" in refusal(read_state, tmp_path / "missing")


@pytest.mark.parametrize(
    ("query", "parent", "message"),
    [
        ("new", "z", "the group z, parent of the query new, is not known; add the original query"),
        ("new", "q~1", "the group q~1, parent of the query new, is derived itself; add the original query"),
        ("q~1", "a", "the query q~1 has the parent a here and q before; give each query one parent"),
    ],
)
def test_queries_without_a_proper_parent_are_refused(query: str, parent: str, message: str) -> None:
    assert message in refusal(with_queries, state_of(POOL), [query], [parent])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nearest(np.zeros(3), 4), "k is 4; expected 1 to 3, the number of queries"),
        (
            lambda: forget_and_add(state_of(POOL), np.zeros(1, np.int64), np.ones(1, bool), forgetting=0.0),
            "forgetting is 0.0; expected a factor in (0, 1], where 1 forgets nothing",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(call: Any, message: str) -> None:
    assert message in refusal(call)


def trie_directory(path: Path, trajectories: list[Trajectory]) -> Path:
    with finished_directory(path) as temporary:
        write_trie(build_trie(trajectories), temporary)
    return path


def rollouts(path: Path) -> Path:
    """Write a trie in which easy passes 8 of 8 and even 2 of 4; one more rollout of even has no reward."""
    rewards: dict[str, list[float | None]] = {"easy": [1.0] * 8, "even": [1.0, 0.0, 1.0, -1.0, None]}
    made = [
        make(f"{group}{i}", [5, len(group), i], group=group, reward=reward)
        for group, line in rewards.items()
        for i, reward in enumerate(line)
    ]
    return trie_directory(path, made)


def test_the_command_keeps_counts_and_selects_what_is_neither_easy_nor_hard(treepack: Run, tmp_path: Path) -> None:
    trie, state, added = rollouts(tmp_path / "trie"), tmp_path / "state.parquet", tmp_path / "added.jsonl"
    queries = [{"query_id": "easy~1", "parent_group": "easy"}, {"uid": "even"}, {"uid": "easy"}]
    added.write_text("".join(json.dumps(query) + "\n" for query in queries))
    update = ("select", "update", state)
    unknown = treepack(*update, "--rollouts", trie)
    assert unknown.status == 1
    assert unknown.err.startswith(f"treepack: {trie}: the group e")
    assert not state.exists()
    done = treepack(*update, "--queries", added, "--rollouts", trie)
    assert (done.status, done.notes) == (0, f"note: {state} is new\n")
    assert done.out == (
        "queries                    3\nqueries added              3\nrollouts                   12\n"
        "rollouts successful        10\nrollouts without a reward  1\nqueries tried              2\n"
        "training steps             1\n"
    )
    table = pq.read_table(state).to_pydict()
    assert table["query_id"] == ["easy", "easy~1", "even"]
    assert (table["passed"], table["tried"]) == ([8, 0, 2], [8, 0, 4])
    # tried: 0.5 * 8 + 8 = 12 and 0.5 * 4 + 4 = 6.
    assert treepack(*update, "--rollouts", trie, "--forgetting", 0.5).status == 0
    assert pq.read_table(state)["tried"].to_pylist() == [12, 0, 6]

    chosen = treepack("select", state, "--k", 3)
    assert (chosen.status, chosen.notes) == (0, "")
    lines = [json.loads(line) for line in chosen.out.splitlines()]
    assert lines[0]["query_id"] == "even"
    assert {line["query_id"]: line["parent_id"] for line in lines} == {"even": None, "easy": None, "easy~1": "easy"}
    assert abs(lines[0]["pass_rate"] - 0.5) < 0.02 < lines[1]["pass_rate"] - 0.5
    assert treepack("select", "--k", 3, state).out == chosen.out
    assert treepack("select", state, "--k", 3, "--seed", 9).out != chosen.out
    assert treepack("select", state, "--k", 3, "--out", tmp_path / "k.jsonl").status == 0
    assert (tmp_path / "k.jsonl").read_text() == chosen.out


def test_the_command_takes_groups_as_queries_if_asked(treepack: Run, tmp_path: Path) -> None:
    # The rollout names the query even~1 and its parent, so both are added, and its group x is not.
    marks = {"query_id": "even~1", "parent_group": "even", "num_reused": 1, "untrained_prefix": 2}
    derived = make("r", [5, 1, 2], spans=[(2, 3, 1.0)], group="x", reward=1.0, metadata={"extra_info": marks})
    trie, state = trie_directory(tmp_path / "trie", [derived]), tmp_path / "state"
    assert treepack("select", "update", state, "--rollouts", trie, "--add-groups").status == 0
    table = pq.read_table(state).to_pydict()
    assert table["query_id"] == ["even", "even~1"]
    assert (table["parent_id"], table["tried"]) == ([None, "even"], [0, 1])


def test_the_command_says_in_one_sentence_what_it_cannot_do(treepack: Run, tmp_path: Path) -> None:
    state, trie = damaged_file(tmp_path / "state"), rollouts(tmp_path / "trie")
    (tmp_path / "bad.jsonl").write_text('{"name": "x"}\n')
    (tmp_path / "there").write_text("")
    calls = [
        (("select", "update", state), 2, "nothing to add; give --queries, --rollouts or both"),
        (("select", "update", state, "--queries", tmp_path / "bad.jsonl"), 1, "bad.jsonl:1: has no query_id; expected"),
        (("select", "update", state, "--rollouts", trie), 1, "of its rollouts is not in the state; add it"),
        (
            ("select", "update", state, "--rollouts", trie, "--success-above", "nan"),
            1,
            "--success-above is nan; expected",
        ),
        (
            ("select", "update", state, "--rollouts", trie, "--add-groups", "--forgetting", 2),
            1,
            "--forgetting is 2.0; ex",
        ),
        (("select", state, "--k", 3), 1, "--k is 3; expected 1 to 2"),
        (("select", trie, "--k", 3), 1, "is not a state of treepack select"),
        (("select", state, "--k", 1, "--out", tmp_path / "there"), 1, "exists; choose another --out or give"),
        (("select", state), 2, "Missing option '--k'"),
        (
            ("select", damaged_file(tmp_path / "old", about={"version": 0}), "--k", 1),
            1,
            "has treepack-selection version 0",
        ),
    ]
    before = state.read_bytes()
    for arguments, status, message in calls:
        done = treepack(*arguments)
        assert (done.status, message in done.err) == (status, True), (arguments, done.err)
        assert status == 2 or done.err.count("\n") == 1
    assert state.read_bytes() == before


def test_the_worked_example_of_the_page() -> None:
    page = (ROOT / "docs" / "tree-rl.md").read_text()
    row = r"\| `(\w+~?\w*)` \| (\d) of (\d) \| (-?[\d.]+) \| ([\d.]+) \| ([\d.]+) \| (-?[\d.]+) \|"
    lines = [[name, *map(float, numbers)] for name, *numbers in re.findall(row, page)]
    assert [line[0] for line in lines] == ["q", "q~1"]
    columns = np.array([line[1:] for line in lines]).T
    passed, tried, kappa, omega, shrinkage, mean = columns
    np.testing.assert_array_equal(passed - tried / 2, kappa)
    shown = conditional(np.array([-1, 0]), kappa, omega, OddsPrior(0.0, 1.0, 1.0))
    np.testing.assert_array_equal(shown.shrinkage, shrinkage)
    np.testing.assert_array_equal(shown.mean, mean)
    old, new = re.search(r"(\d) of (\d) becomes 2\.5 of 4", page), re.search(r"then passes (\d) of (\d)", page)
    assert old is not None
    assert new is not None
    state = state_of({"q": None}, {"q": (float(old[1]), float(old[2]))})
    success = np.arange(int(new[2])) < int(new[1])
    state = forget_and_add(state, np.zeros(len(success), np.int64), success, forgetting=0.5)
    assert (state.passed[0], state.tried[0]) == (2.5, 4.0)


def test_an_update_of_a_training_step_is_counted_once(treepack: Run, tmp_path: Path) -> None:
    state, arguments = tmp_path / "state.parquet", ("--add-groups", "--step")
    for step in (3, 4):
        made = [make(f"r{i}", [1, 2 + i], group="q", step=step, reward=float(i)) for i in range(2)]
        saved(build_trie(made), tmp_path / f"trie-{step}")
    update = ("select", "update", state, "--rollouts", tmp_path / "trie-3", *arguments)
    first = treepack(*update, 3)
    assert (first.status, first.notes) == (0, f"note: {state} is new\n")
    before = state.read_bytes()
    again = treepack(*update, 3)
    assert (again.status, again.notes) == (
        0,
        f"note: {state} has counted the training step 3 already, so it does not change\n",
    )
    assert state.read_bytes() == before
    other = treepack(*update, 4)
    assert other.status == 1
    assert "its rollouts belong to the training step 3 and --step is 4; give the trie of one step" in other.err
    assert state.read_bytes() == before
    assert treepack("select", "update", state, "--rollouts", tmp_path / "trie-4", *arguments, 4).status == 0
    counted = read_state(state)
    assert (counted.steps, counted.num_updates, counted.tried.tolist()) == ((3, 4), 2, [0.9 * 2 + 2])
    (tmp_path / "none").write_text('{"query_id": "p"}\n')
    assert treepack("select", "update", state, "--queries", tmp_path / "none", "--step", 2).status == 2
