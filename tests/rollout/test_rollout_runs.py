"""A run writes whole trees, loses none of them, and continues where it stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.rollout.engine import EngineError, Segment
from treepack.rollout.episode import Episode, SingleTurn
from treepack.rollout.options import RolloutOptions, TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.run import sample_rollouts
from treepack.rollout.simulated import LengthLaw, SimulatedEngine, log_normal_lengths
from treepack.rollout.summary import RolloutSummary
from treepack.trajectory import Int32

LAW = LengthLaw(log_normal_lengths(mean=12, sigma=0.6, longest=40), num_prompt=2, vocab_size=8)
SHAPE = TreeOptions(width=4, max_tokens=40, segment=12, depth=None)
QUERIES = [Query(f"q{i}", f"q{i}", np.array([1, i], np.int32)) for i in range(6)]


def sample(
    out: Path,
    queries: Sequence[Query] = QUERIES,
    options: TreeOptions = SHAPE,
    *,
    engine: SimulatedEngine | None = None,
    start: Any = None,
    **run: Any,
) -> RolloutSummary:
    used = engine or SimulatedEngine(LAW)
    settings = RolloutOptions(**({"seed": 3, "max_queries": 2} | run))
    return asyncio.run(sample_rollouts(queries, used, options, out=out, run=settings, start=start))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run without interruption."""
    out = tmp_path_factory.mktemp("whole") / "rollouts.jsonl"
    sample(out)
    return out.read_bytes()


def trees(data: bytes) -> list[bytes]:
    """Return the lines of each tree, sorted, and check that every tree is whole and in one piece."""
    result: list[list[bytes]] = []
    for line in data.splitlines(keepends=True):
        record = json.loads(line)
        name, number = record["rollout_id"].rsplit("/", 1)
        if number == "0":
            result.append([])
        assert int(number) == len(result[-1])
        assert name == record["group_id"]
        result[-1].append(line)
    assert all(len(lines) == json.loads(lines[0])["num_leaves"] == 4 for lines in result)
    return sorted(b"".join(lines) for lines in result)


def test_every_query_has_a_tree_and_the_seed_decides_all_of_them(whole: bytes, tmp_path: Path) -> None:
    assert len(trees(whole)) == 6
    sample(tmp_path / "again", max_queries=5, concurrency=1)
    assert trees((tmp_path / "again").read_bytes()) == trees(whole)
    sample(tmp_path / "other", seed=4)
    assert not set(trees((tmp_path / "other").read_bytes())) & set(trees(whole))


def test_a_file_that_was_cut_off_anywhere_is_completed_to_the_same_trees(whole: bytes, tmp_path: Path) -> None:
    sample(tmp_path / "full")
    options = (tmp_path / "full.run").read_bytes()
    ends = np.cumsum([len(line) for line in whole.splitlines(keepends=True)]).tolist()
    places = [0, 1, *(end + shift for end in ends[::5] for shift in (-1, 0, 1)), ends[-1]]
    out = tmp_path / "cut"
    for place in places:
        out.write_bytes(whole[:place])
        out.with_name("cut.run").write_bytes(options)
        summary = sample(out, resume=True)
        data = out.read_bytes()
        assert trees(data) == trees(whole)
        # The whole trees before the cut stay where they are, byte for byte; a line without its end counts as one too.
        num_whole = sum(end <= place for end in ends[3::4])
        size = ends[4 * num_whole - 1] if num_whole else 0
        assert data[:size] == whole[:size]
        assert summary.num_before == num_whole
        assert summary.num_removed == whole[size:place].count(b"\n") + (place > 0 and whole[place - 1 : place] != b"\n")


def test_a_killed_process_loses_no_tree(whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    program = """
import asyncio, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from rollout.test_rollout_runs import LAW, SHAPE, QUERIES, sample
from treepack.rollout.simulated import SimulatedEngine
calls = 0
async def pause():
    global calls
    calls += 1
    await asyncio.sleep(0.001 if calls < 12 else 60)
sample(Path(sys.argv[1]), engine=SimulatedEngine(LAW, pause=pause))
"""
    folders = [str(Path(__file__).parent.parent)]
    process = subprocess.Popen([sys.executable, "-c", program, str(out), *folders])
    while process.poll() is None and (not out.exists() or out.stat().st_size == 0):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = trees(out.read_bytes())
    assert 1 <= len(finished) < 6
    # The lock of the killed process is gone with it.
    assert sample(out, resume=True).num_before == len(finished)
    assert trees(out.read_bytes()) == trees(whole)


def test_a_run_cancelled_at_any_request_keeps_its_trees(whole: bytes, tmp_path: Path) -> None:
    class Cancelling(SimulatedEngine):
        """An engine that cancels the run at request number `at`."""

        def __init__(self, at: int) -> None:
            super().__init__(LAW)
            self.at = at
            self.num_requests = 0
            self.task: asyncio.Task[Any] | None = None

        async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
            self.num_requests += 1
            if self.num_requests == self.at:
                assert self.task is not None
                self.task.cancel()
            return await super().extend(ids, count=count, max_tokens=max_tokens, seed=seed)

    async def cancelled(engine: Cancelling, out: Path) -> None:
        run = RolloutOptions(seed=3, max_queries=2)
        engine.task = asyncio.ensure_future(sample_rollouts(QUERIES, engine, SHAPE, out=out, run=run))
        with pytest.raises(asyncio.CancelledError):
            await engine.task
        assert len(asyncio.all_tasks()) == 1  # this one: no query goes on

    numbers = []
    for at in range(1, 14, 3):
        out = tmp_path / f"cancelled-{at}"
        asyncio.run(cancelled(Cancelling(at), out))
        numbers.append(len(trees(out.read_bytes())) if out.exists() else 0)
        sample(out, resume=True)
        assert trees(out.read_bytes()) == trees(whole)
    assert numbers[0] == 0
    assert numbers[-1] >= 2


class Failing(SimulatedEngine):
    """An engine that fails for good at the query whose prompt ends with 4."""

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        if ids[1] == 4:
            raise EngineError("the engine has run out of memory; lower --concurrency")
        return await super().extend(ids, count=count, max_tokens=max_tokens, seed=seed)


def test_a_failed_engine_leaves_the_finished_trees_and_one_sentence(whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    assert refusal(sample, out, engine=Failing(LAW), max_queries=1) == (
        f"the engine has run out of memory; lower --concurrency; 4 of 6 trees are in {out}, continue with --resume"
    )
    assert sample(out, resume=True).num_before == 4
    assert trees(out.read_bytes()) == trees(whole)


def test_a_failure_before_the_first_tree_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    assert "no tree was finished" in refusal(sample, out, QUERIES[4:5], engine=Failing(LAW))
    assert not out.exists()
    assert sample(out).num_queries == 6


def test_an_episode_that_raises_names_itself_and_stops_the_run(tmp_path: Path) -> None:
    async def start(query: Query) -> tuple[Int32, Episode]:
        async def score(response: Int32) -> float | None:
            if query.key == "q5":
                raise TreepackError("rewards:score raised ValueError: no solution")
            return 1.0

        return query.prompt, SingleTurn(score)

    out = tmp_path / "rollouts.jsonl"
    with pytest.raises(TreepackError, match=r"no solution; 5 of 6 trees are in .*, continue with --resume"):
        sample(out, start=start, max_queries=1)


def test_a_full_disk_leaves_whole_trees(tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        assert re.search(r"cannot be written \(File too large\); free some room; . of 6 trees", refusal(sample, out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 1 <= len(trees(out.read_bytes())) < 6


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 4}, "seed was 3 when its run started and is 4 now"),
        ({"options": TreeOptions(width=8, max_tokens=40, segment=12, depth=None)}, "width was 4 when .* and is 8 now"),
        ({"settings": {"model": "m"}}, 'model was not given when its run started and is "m" now'),
        ({"queries": QUERIES[:3]}, "has rollouts of q., which the prompts lack"),
        ({"queries": [*QUERIES[:5], Query("q5", "q5", np.array([2, 5], np.int32))]}, "q5 with another prompt than"),
        ({"resume": False}, "exists; continue its run with --resume, or choose another --out"),
    ],
)
def test_another_run_does_not_continue_a_file(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    out = tmp_path / "rollouts.jsonl"
    sample(out)
    before = out.read_bytes()
    with pytest.raises(TreepackError, match=sentence):
        sample(out, **({"resume": True} | change))
    assert out.read_bytes() == before


def test_more_queries_may_be_added_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    sample(out, QUERIES[:2])
    assert sample(out, resume=True).num_queries == 4


@pytest.mark.parametrize("line", [b"{}\n", b"not json\n", b'{"rollout_id": "q9/1", "num_leaves": 4}\n'])
def test_a_file_with_other_lines_is_not_continued(tmp_path: Path, line: bytes) -> None:
    out = tmp_path / "rollouts.jsonl"
    sample(out)
    out.write_bytes(line + out.read_bytes())
    assert ":1: is not the line that treepack rollout wrote there; restore the file" in refusal(
        sample, out, resume=True
    )


def test_a_file_without_the_options_of_its_run_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    sample(out)
    (tmp_path / "rollouts.jsonl.run").unlink()
    assert "cannot be resumed without rollouts.jsonl.run" in refusal(sample, out, resume=True)


@pytest.mark.parametrize("ids", [["1"], [None], [[1]], [2**31], [-1], [1.5], [True]])
def test_a_file_whose_last_tree_has_odd_prompt_ids_is_not_continued(tmp_path: Path, ids: list[Any]) -> None:
    out = tmp_path / "rollouts.jsonl"
    sample(out)
    lines = out.read_bytes().splitlines()
    changed = json.dumps(json.loads(lines[-1]) | {"prompt_token_ids": ids}).encode()
    out.write_bytes(b"\n".join([*lines[:-1], changed]) + b"\n")
    with pytest.raises(TreepackError, match=r":\d+: is not the line that treepack rollout wrote there; restore the"):
        sample(out, resume=True)
    assert out.read_bytes().splitlines()[-1] == changed


@pytest.mark.parametrize("text", ["[" * 100_000, "", "null", "[]"])
def test_damaged_options_of_a_run_are_one_sentence(tmp_path: Path, text: str) -> None:
    out = tmp_path / "rollouts.jsonl"
    sample(out)
    (tmp_path / "rollouts.jsonl.run").write_text(text)
    assert "cannot be resumed without rollouts.jsonl.run" in refusal(sample, out, resume=True)


def test_the_options_of_a_run_are_on_the_disk_before_its_first_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr("treepack.rollout.output.os.fsync", watched)
    sample(tmp_path / "rollouts.jsonl")
    options, folder, *trees = flushed
    assert options.startswith(".rollouts.jsonl.run.partial-")
    assert folder == tmp_path.name
    assert trees == ["rollouts.jsonl"] * len(QUERIES)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "rollouts.jsonl"
    other = "from treepack.files.lock import lock\nimport sys\nwith lock(sys.argv[1]):\n print(flush=True)\n input()"
    with subprocess.Popen([sys.executable, "-c", other, out], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert "is being written by process" in refusal(sample, out)
        process.communicate(b"\n")


def test_an_address_is_refused() -> None:
    assert "which a store cannot do; give a file on this machine" in refusal(
        asyncio.run, sample_rollouts(QUERIES, SimulatedEngine(LAW), SHAPE, out="s3://bucket/rollouts.jsonl")
    )


def test_two_queries_with_one_key_are_refused(tmp_path: Path) -> None:
    assert "a query: has the key q0, which an earlier query has too; give it its own" in refusal(
        sample, tmp_path / "rollouts.jsonl", [QUERIES[0], Query("q0", "q0", np.array([2], np.int32))]
    )


def test_a_parquet_name_is_refused(tmp_path: Path) -> None:
    assert "is written as JSON lines; let its name end in .jsonl" in refusal(sample, tmp_path / "rollouts.parquet")


def test_the_summary_counts_tokens_against_independent_rollouts(tmp_path: Path) -> None:
    out = tmp_path / "trees"
    summary = sample(out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    lengths = np.array([len(record["response_ids"]) for record in records])
    before = np.array([record.get("leaf_weight_before_fallback", record["leaf_weight"]) for record in records])
    assert (summary.num_rollouts, sum(summary.finished.values())) == (24, 24)
    assert summary.length is not None
    assert summary.saved is not None
    # Six trees of four leaves each: weights sum to 6, so the mean is a sixth of the weighted sum.
    assert summary.length.before_fallback == pytest.approx((lengths * before).sum() / 6)
    assert summary.length.unweighted == pytest.approx(lengths.mean())
    assert summary.saved == pytest.approx(1 - summary.tokens_decoded / (4 * (lengths * before).sum()))
    assert summary.tokens_decoded < lengths.sum()
    assert summary.num_fallback == sum("fallback" in record for record in records) > 0


def test_independent_rollouts_save_nothing_and_have_one_mean(tmp_path: Path) -> None:
    async def start(query: Query) -> tuple[Int32, Episode]:
        async def score(response: Int32) -> float | None:
            return float(len(response) > 10)

        return query.prompt, SingleTurn(score)

    out = tmp_path / "independent"
    summary = sample(out, options=independent(width=4, max_tokens=40), start=start)
    assert summary.saved == pytest.approx(0)
    assert summary.length is not None
    assert summary.reward is not None
    assert summary.length.before_fallback == pytest.approx(summary.tokens_decoded / 24)
    rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()]
    assert summary.is_pass_rate
    assert summary.reward.before_fallback == pytest.approx(np.mean(rewards))
    assert 0 < np.mean(rewards) < 1


def test_counts_of_queries_replace_the_width(tmp_path: Path) -> None:
    out = tmp_path / "counts"
    queries = [
        Query("a", "a", np.array([1, 2], np.int32), count=7),
        Query("b", "b", np.array([1, 3], np.int32), count=2),
    ]
    sample(out, queries, independent(width=4, max_tokens=40))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["group_id"] for record in records].count("a") == 7
    assert [record["group_id"] for record in records].count("b") == 2
    assert {record["leaf_weight"] for record in records} == {1 / 7, 1 / 2}


@pytest.mark.parametrize("name", ["concurrency", "max_queries", "attempts", "timeout"])
def test_limits_of_0_are_refused(name: str) -> None:
    assert refusal(RolloutOptions, **{name: 0}).startswith(f"{name} is 0; expected")
