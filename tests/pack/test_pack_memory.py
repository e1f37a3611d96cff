"""Packing within a limit of memory: the same rows, memory that does not grow with the tokens, and refusals."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support import strategies
from support.command_line import Run
from support.strategies import make
from support.trie_files import saved
from treepack import PackOptions, TreepackError, pack_trie, plan_packing
from treepack.pack.options import NORMALIZE
from treepack.pack.packing import planning_bytes
from treepack.pack.row import Row
from treepack.sequences import as_columns, with_unique_ids
from treepack.trajectory import Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie, with_places
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie

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


@pytest.mark.parametrize(
    "options",
    [
        PackOptions(method="contiguous", semantics="once"),
        PackOptions(method="auto", effort="low", normalize="group"),
        PackOptions(method="sequence", balance=2),
        PackOptions(capacity=509, too_long="truncate"),
        PackOptions(capacity=509, too_long="drop"),
        PackOptions(leaf_weights=True),
    ],
    ids=["once", "auto", "sequence", "truncate", "drop", "leaf weights"],
)
def test_the_files_do_not_depend_on_the_memory(tmp_path: Path, options: PackOptions) -> None:
    trie = build_trie(branching(48, 512))
    memory = planning_bytes(trie.num_nodes, trie.num_trajectories)
    assert 4 * trie.tokens_tree > memory // 8  # so the trie is mapped
    saved(trie, tmp_path / "trie")
    pack_trie(tmp_path / "trie", tmp_path / "small", options, memory=memory)
    pack_trie(tmp_path / "trie", tmp_path / "large", options)
    assert contents(tmp_path / "small") == contents(tmp_path / "large")
    assert len(contents(tmp_path / "small")) == 2


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


PEAK = """
import sys
from treepack import PackOptions, pack_trie

pack_trie(sys.argv[1], sys.argv[2], PackOptions(capacity=65536, method="contiguous"), memory=64 << 20)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_of_the_process_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    def peak(num_trajectories: int) -> int:
        directory = saved(long_trie(num_trajectories, 1 << 14), tmp_path / "trie")
        command = [sys.executable, "-c", PEAK, str(directory), str(tmp_path / f"packed-{num_trajectories}")]
        return 1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # 1280 trajectories more are 21 M tokens: 84 MB of token ids, and 130 MB if everything is in memory.
    assert peak(1536) - peak(256) < 40 << 20
