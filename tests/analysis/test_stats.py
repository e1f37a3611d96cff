"""Statistics: of tries in memory, and the same numbers from tries mapped from files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import oracle, strategies
from support.command_line import Run
from support.oracle_sharing import Added, added_by_name
from support.strategies import make
from support.trie_files import saved
from support.written_rollouts import write_rollouts
from treepack import PackOptions, StatsOptions, TreepackError, build_trie_directory, check, pack_trie, stats
from treepack.analysis import describe as describe_module
from treepack.analysis import forecast
from treepack.analysis.capacities import plan_capacities, predicted_totals
from treepack.analysis.describe import describe_rows, describe_trie, por_by_depth, quantiles
from treepack.analysis.forecast import whole_work
from treepack.analysis.lost_sharing import added_tokens
from treepack.files.column_views import ChunkedRows
from treepack.pack import expected
from treepack.pack.expected import IdIndex
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory
from treepack.trie import storage, token_ranges
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.totals import trie_totals


@given(strategies.trajectories(steps=False))
def test_totals_follow_from_the_sequences(trajectories: list[Trajectory]) -> None:
    contents = [t.content for t in trajectories if isinstance(t.content, Tokens)]
    totals = trie_totals(build_trie(trajectories))
    flat = sum(len(content.tokens) for content in contents)
    tree = oracle.union_tokens([content.tokens.tolist() for content in contents])
    assert totals["num_trajectories"] == len(trajectories)
    assert totals["num_groups"] == len({t.group_id for t in trajectories})
    assert (totals["tokens_flat"], totals["tokens_tree"]) == (flat, tree)
    assert totals["tokens_trained"] == sum(content.num_trained for content in contents)
    assert totals["por"] == pytest.approx(1 - tree / flat)


@given(strategies.trajectories())
def test_depth_ranges_add_up(trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describe_module, "FIRST_DEPTH", 2)
        ranges = por_by_depth(trie)
    assert sum(part["tokens_flat"] for part in ranges) == trie.tokens_flat
    assert sum(part["tokens_tree"] for part in ranges) == trie.tokens_tree
    assert [part["start"] for part in ranges[1:]] == [part["end"] for part in ranges[:-1]]


def test_overlap_lies_where_it_is() -> None:
    trie = build_trie([make(f"t{i}", [1] * 256 + [i + 2] * 256) for i in range(4)])
    assert [part["por"] for part in por_by_depth(trie)] == [0.75, 0.0]


@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 24))
def test_predictions_are_what_packing_gives(trajectories: list[Trajectory], capacity: int) -> None:
    trie = build_trie(trajectories)
    rows = list(pack_rows(trie, plan_rows(trie, capacity=capacity)))
    (predicted,) = predicted_totals(plan_capacities(trie, [capacity], method="auto", too_long="error"))
    tokens = sum(row.num_tokens for row in rows)
    assert (predicted["num_rows"], predicted["tokens_packed"]) == (len(rows), tokens)
    assert predicted["err"] == pytest.approx(1 - tokens / trie.tokens_flat)
    assert predicted["fill"] == pytest.approx(tokens / (len(rows) * capacity))
    assert predicted["lower_bound"] <= tokens
    assert predicted["err"] <= 1 - trie.tokens_tree / trie.tokens_flat + 1e-12


def test_predictions_count_what_does_not_fit() -> None:
    trie = build_trie([make("a", [1, 2]), make("b", [1, 2, 3, 4, 5])])
    (predicted,) = predicted_totals(plan_capacities(trie, [3], method="contiguous", too_long="drop"))
    assert (predicted["num_too_long"], predicted["tokens_packed"]) == (1, 2)


@given(trajectories=strategies.trajectories(), capacity=st.integers(9, 24))
def test_rows_are_described_by_their_own_columns(trajectories: list[Trajectory], capacity: int) -> None:
    trie = build_trie(trajectories)
    rows = list(pack_rows(trie, plan_rows(trie, capacity=capacity)))
    report = describe_rows(rows)
    assert report["lengths"] == quantiles(np.sort(trie.lengths))
    assert sum(part["tokens_flat"] for part in report["err_by_depth"]) == trie.tokens_flat
    assert sum(part["tokens_packed"] for part in report["err_by_depth"]) == sum(row.num_tokens for row in rows)
    assert report["row_trajectories"]["count"] == len(rows)


def test_reports_are_plain_json() -> None:
    trie = build_trie([make("a", [1, 2]), make("b", [1, 3], group="h")])
    planned = plan_capacities(trie, [8], method="heuristic", too_long="drop")
    report = describe_trie(trie) | {"predicted": predicted_totals(planned)}
    assert json.loads(json.dumps(report)) == report


EXAMPLES = max(3, settings().max_examples // 20)  # each packs, and reads everything six times


MEMORY = 1 << 20  # enough for the nodes and trajectories of the small tries of these tests


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map every array of a trie, and read few tokens at a time."""
    monkeypatch.setattr(storage, "SHARE", 1 << 60)
    monkeypatch.setattr(token_ranges, "RANGE_TOKENS", 5)
    monkeypatch.setattr(storage, "RELEASE_TOKENS", 1)
    monkeypatch.setattr(forecast, "TRAJECTORIES_AT_ONCE", 1)


def with_values(rollouts: list[Trajectory], rng: random.Random) -> list[Trajectory]:
    """Add calls, rewards, and for some of the rollouts values for each trained token and temperatures."""
    made = []
    for i, one in enumerate(rollouts):
        assert isinstance(one.content, Tokens)
        name = rng.choice([f"r{i}", f"r{i % 3}/turn-{i}", f"r/part-{i}@f:1"])
        values = np.arange(one.content.num_trained, dtype=np.float32)
        content = replace(one.content, old_logprob=-values, temperature=values) if i % 3 == 0 else one.content
        content = replace(content, advantage=values.astype(np.float64)) if i % 4 == 0 else content
        temperature = 0.5 if i % 3 == 1 else None
        values_of_all: dict[str, Any] = {"reward": float(i % 2), "advantage": i / 3, "temperature": temperature}
        made.append(replace(one, trajectory_id=name, content=content, **values_of_all))
    return made


# All examples share the folder and the small pieces; each replaces the directories of the one before.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=EXAMPLES)
@given(
    rollouts=strategies.trajectories(),
    rng=st.randoms(use_true_random=False),
    method=st.sampled_from(["contiguous", "sequence"]),
    once=st.booleans(),
)
def test_reports_and_checks_do_not_depend_on_the_memory(
    small_ranges: None, tmp_path: Path, rollouts: list[Trajectory], rng: random.Random, method: str, once: bool
) -> None:
    trie = saved(build_trie(with_values(rollouts, rng)), tmp_path / "trie")
    semantics = "once" if once and method != "sequence" else "branch"
    options = PackOptions(capacity=16, method=method, semantics=semantics, normalize="group")
    packed = tmp_path / "packed"
    pack_trie(trie, packed, options, overwrite=True)
    assert read_trie(trie, memory=MEMORY).storage.maps
    for path, capacities in ((trie, (9, 16)), (trie, ()), (packed, ())):
        asked = StatsOptions(check=True, trie=trie if path == packed else None, capacities=capacities)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "SHARE", 1)
            whole = stats([path], asked)
        assert stats([path], asked, memory=MEMORY) == whole
        assert check(path, memory=MEMORY) == check(path)


@given(strategies.trajectories(), st.randoms(use_true_random=False))
def test_added_tokens_are_those_of_a_comparison_with_all_trajectories(
    rollouts: list[Trajectory], rng: random.Random
) -> None:
    rollouts = with_values(rollouts, rng)
    trie = build_trie(rollouts)
    names = trie.trajectories["trajectory_id"].to_pylist()
    # Names may repeat; the trie has unique ones.
    by_source = {one.source: one for one in rollouts}
    keys = zip(trie.trajectories["source"].to_pylist(), names, strict=True)
    unique = [replace(by_source[source], trajectory_id=name) for source, name in keys]
    added = added_tokens(trie)
    for i, name in enumerate(names):
        other = int(added.expected[i])
        actual = Added(
            int(added.start[i]),
            int(added.lost[i]),
            None if other < 0 else names[other],
            int(added.common[i]),
            bool(added.is_call[i]),
        )
        assert actual == added_by_name(unique)[name], name


@pytest.mark.parametrize("number", ["2" * 30, "\u0663"])
def test_numbers_of_calls_may_be_long_or_have_other_digits(number: str) -> None:
    calls = [make(f"r/turn-{each}", [1, 2, i + 3]) for i, each in enumerate(("0", "1", number))]
    trie = build_trie(calls)
    names = trie.trajectories["trajectory_id"].to_pylist()
    before = added_tokens(trie).expected[names.index(f"r/turn-{number}")]
    assert names[before] == "r/turn-1"


def test_a_path_trains_the_tokens_of_all_samples_above_its_end() -> None:
    # Samples of turns that continue each other: 5 trains with 1 2 3, then 6 7 with the first path, and 8 with another.
    spans = [(2, 3, 1.0)], [(3, 5, 1.0)], [(4, 5, 1.0)]
    paths = [1, 2, 3], [1, 2, 3, 6, 7], [1, 2, 3, 9, 8]
    trie = build_trie([make(f"t{i}", path, spans=own) for i, (path, own) in enumerate(zip(paths, spans, strict=True))])
    work = whole_work(trie)
    assert (work.tokens, work.targets) == (10, (1 + 2) + (1 + 1))


@given(st.lists(st.text(max_size=3), min_size=1, unique=True), st.integers(1, 4), st.randoms(use_true_random=False))
def test_ids_are_found_even_if_hashes_collide(names: list[str], chunk: int, rng: random.Random) -> None:
    column = pa.chunked_array([names[i : i + chunk] for i in range(0, len(names), chunk)], pa.string())
    asked = [*rng.sample(names, len(names)), "unknown", ""]
    numbers = [names.index(name) if name in names else -1 for name in asked]
    assert IdIndex(column).find(asked).tolist() == numbers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected, "_hashes", lambda texts: np.array([len(text.as_py()) for text in texts], np.uint64))
        assert IdIndex(column).find(asked).tolist() == numbers


@given(st.lists(st.integers(0, 4), min_size=1), st.data())
def test_rows_of_a_table_of_many_chunks_are_those_of_the_whole_table(sizes: list[int], data: st.DataObject) -> None:
    numbers = iter(range(sum(sizes)))
    table = pa.table({"n": pa.chunked_array([[next(numbers) for _ in range(size)] for size in sizes], pa.int64())})
    rows = data.draw(st.lists(st.integers(0, sum(sizes) - 1))) if sum(sizes) else []
    assert ChunkedRows(table).take(np.array(rows, np.int64))["n"].to_pylist() == rows


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 20))
def test_ranges_reach_the_limit_and_lose_nothing(sizes: list[int], limit: int) -> None:
    bounds = list(token_ranges.ranges(np.concatenate([[0], np.cumsum(sizes)]), limit))
    assert [i for first, end in bounds for i in range(first, end)] == list(range(len(sizes)))
    assert all(sum(sizes[first:end]) < limit + max(sizes) for first, end in bounds)


def test_a_trie_whose_nodes_do_not_fit_is_refused(treepack: Run, tmp_path: Path) -> None:
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl", num=60)
    trie, packed = tmp_path / "trie", tmp_path / "packed"
    build_trie_directory([rollouts], trie)
    pack_trie(trie, packed, PackOptions(capacity=12))
    sentence = r"^{} 60 trajectories, \d+ nodes and 60 trained spans needs about 1 MB .*; give --memory 1M$"
    with pytest.raises(TreepackError, match=sentence.format("describing")):
        stats([trie], memory=5000)
    for directory in (trie, packed):
        with pytest.raises(TreepackError, match=sentence.format("checking")):
            check(directory, memory=5000)
    with pytest.raises(TreepackError, match=sentence.format("checking")):
        stats([packed], StatsOptions(check=True), memory=5000)
    assert treepack("stats", trie, "--memory", "5K").status == 1
    assert treepack("stats", trie, "--memory", "1M", "--json").json == treepack("stats", trie, "--json").json


GROWTH = """
import sys
from pathlib import Path
from treepack import StatsOptions, check, stats
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def reset():
    Path("/proc/self/clear_refs").write_text("5")
small, large = sys.argv[1:3]
for trie in (small, large):
    reset()
    stats([trie], StatsOptions(check=True), memory=1 << 23)
    check(trie + "-packed", memory=1 << 23)
    print(peak() << 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    """Four times the tokens in as many trajectories: 60 MB more of token ids alone, and of peaks at most a third."""
    rng, tries = np.random.default_rng(0), []
    for name, length in (("small", 10_000), ("large", 40_000)):
        trained = np.array([1], np.int32), np.array([length], np.int32), np.ones(1)
        trie = build_trie(
            Trajectory(f"t{i}", "made", Tokens(rng.integers(0, 1000, length, np.int32), *trained)) for i in range(500)
        )
        tries.append(saved(trie, tmp_path / name))
        pack_trie(tries[-1], tmp_path / f"{name}-packed", PackOptions(capacity=1 << 17, method="contiguous"))
    done = subprocess.run([sys.executable, "-c", GROWTH, *tries], capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 20e6
