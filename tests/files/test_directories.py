"""Directories: complete or absent, equal bytes for equal input, and a sentence for each kind of damage."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from support import strategies
from support.strategies import make
from treepack.errors import TreepackError
from treepack.files import parts
from treepack.files.directory import finished_directory, refuse_existing
from treepack.files.manifest import file_sha256, read_manifest
from treepack.pack import files as packed_files
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie import files as trie_files
from treepack.trie.build import build_trie
from treepack.trie.files import read_trie, write_trie
from treepack.trie.trie import Trie

# All examples of a property share one tmp_path; each example overwrites the directory of the one before.
once_per_function = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def equal(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        # NaN means a missing value in float columns, so NaN equals NaN.
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, pa.Table):
        return bool(a.equals(b))
    if hasattr(a, "__dataclass_fields__"):
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))  # type: ignore[arg-type]
    return a == b


def save_trie(trie: Trie, out: Path) -> Path:
    with finished_directory(out, overwrite=True) as temporary:
        write_trie(trie, temporary)
    return out


def save_packed(rows: list[Row], out: Path) -> Path:
    with finished_directory(out, overwrite=True) as temporary:
        write_packed(rows, temporary, capacity=20)
    return out


def rows_of(trajectories: list[Trajectory], capacity: int = 20) -> list[Row]:
    trie = build_trie(trajectories)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity)))


@once_per_function
@given(trajectories=strategies.trajectories())
def test_a_trie_reads_back_as_written(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    trie = build_trie(trajectories)
    assert equal(read_trie(save_trie(trie, tmp_path / "trie")), trie)


@once_per_function
@given(trajectories=strategies.trajectories())
def test_rows_read_back_as_written(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    rows = rows_of(trajectories)
    back = list(read_rows(save_packed(rows, tmp_path / "packed")))
    assert len(back) == len(rows)
    assert all(map(equal, back, rows))


def test_terms_read_back_as_written(tmp_path: Path) -> None:
    # "b" has no reward, advantages or log-probabilities: its values in these columns must come back as missing.
    a = make("a", [1, 2, 3], reward=1.0, advantages=np.array([0.5, -1]), old_logprobs=np.array([-1, -2], np.float32))
    rows = rows_of([a, make("b", [1, 5])])
    (back,) = read_rows(save_packed(rows, tmp_path / "packed"))
    assert equal(back, rows[0])


def test_several_parts_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 30 trajectories of 10 tokens without a common prefix: 300 tokens need several parts of 40 tokens.
    monkeypatch.setattr(parts, "PART_TOKENS", 40)
    monkeypatch.setattr(trie_files, "PART_TOKENS", 40)
    monkeypatch.setattr(packed_files, "GROUP_TOKENS", 20)
    trajectories = [make(f"t{i:02}", [i, *range(9)]) for i in range(30)]
    trie = build_trie(trajectories)
    assert equal(read_trie(save_trie(trie, tmp_path / "trie")), trie)
    rows = rows_of(trajectories, capacity=10)
    assert all(map(equal, read_rows(save_packed(rows, tmp_path / "packed")), rows))
    assert len(read_manifest(tmp_path / "packed")["files"]) > 3


def test_same_input_same_bytes(tmp_path: Path) -> None:
    trajectories = [make(f"t{i}", [1, 2, i, i]) for i in range(20)]
    # "b" gets the same trajectories in reverse order.
    for name, order in (("a", trajectories), ("b", trajectories[::-1])):
        save_trie(build_trie(order), tmp_path / name)
        save_packed(rows_of(order), tmp_path / f"{name}-rows")
    for first, second in (("a", "b"), ("a-rows", "b-rows")):
        names = sorted(path.name for path in (tmp_path / first).iterdir())
        assert names == sorted(path.name for path in (tmp_path / second).iterdir())
        for name in names:
            assert (tmp_path / first / name).read_bytes() == (tmp_path / second / name).read_bytes()


def test_at_most_6_bytes_a_token_with_a_vocabulary_of_150_000(tmp_path: Path) -> None:
    # A random id of 150,000 needs 17.2 bits, 2.2 bytes; the rest is for positions, parents and weights.
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 150_000, 1000).tolist()
    trajectories = [make(f"t{i}", trunk + rng.integers(0, 150_000, 700).tolist()) for i in range(40)]
    rows = rows_of(trajectories, capacity=8192)
    out = save_packed(rows, tmp_path / "packed")
    size = sum(path.stat().st_size for path in out.iterdir())
    assert size / sum(row.num_tokens for row in rows) <= 6


def write_again(out: Path) -> None:
    with finished_directory(out) as temporary:
        write_trie(build_trie([make("other", [5, 6])]), temporary)


def test_existing_output_is_refused_and_kept(tmp_path: Path) -> None:
    out = save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(TreepackError, match="exists; choose another --out or give --overwrite"):
        write_again(out)
    assert (out / "manifest.json").read_bytes() == before


def test_a_directory_of_somebody_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(TreepackError, match="was not written by treepack"):
        refuse_existing(tmp_path / "mine", overwrite=True)


def write_half(out: Path, failure: BaseException) -> None:
    with finished_directory(out, overwrite=True) as temporary:
        (temporary / "nodes-00000.parquet").write_bytes(b"half")
        raise failure


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_run_leaves_the_old_output_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    out = save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    before = (out / "manifest.json").read_bytes()
    expected = TreepackError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_half(out, failure)
    assert (out / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


KILLED = """
import os, pathlib
from treepack.files import directory
def die(*_):
    os.kill(os.getpid(), 9)
{patch}
with directory.finished_directory(pathlib.Path("trie"), overwrite=True) as temporary:
    (temporary / "manifest.json").write_text("{{}}")
    {last}
"""


@pytest.mark.parametrize(
    ("patch", "last"),
    # An overwrite writes a temporary directory, moves the old output away, and moves the new one to its place.
    [
        ("", "die()"),
        ("directory._swap = die", "pass"),
        ("rename = pathlib.Path.rename\npathlib.Path.rename = lambda a, b: (rename(a, b), die())", "pass"),
    ],
    ids=["while writing", "before the swap", "inside the swap"],
)
def test_a_run_killed_at_any_point_can_be_repeated(tmp_path: Path, patch: str, last: str) -> None:
    trie = build_trie([make("a", [1, 2])])
    save_trie(trie, tmp_path / "trie")
    code = KILLED.format(patch=patch, last=last)
    killed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert killed.returncode == -9
    # The killed run has left a temporary or a moved directory, which the next run must remove.
    assert len(list(tmp_path.iterdir())) > 1
    save_trie(build_trie([make("b", [3, 4])]), tmp_path / "trie")
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]
    assert read_trie(tmp_path / "trie").trajectories["trajectory_id"].to_pylist() == ["b"]


def test_an_output_that_a_killed_swap_moved_away_is_not_overwritten_unasked(tmp_path: Path) -> None:
    out = save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    # The state between the two moves of an overwrite. Linux has no process 999999999, so the run is over.
    out.rename(tmp_path / ".trie.old-999999999")
    with pytest.raises(TreepackError, match="exists; choose another --out"):
        write_again(out)
    assert read_trie(out).trajectories["trajectory_id"].to_pylist() == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


def test_the_next_run_removes_the_files_of_a_killed_run(tmp_path: Path) -> None:
    left = tmp_path / ".trie.partial-999999999"
    left.mkdir()
    (left / "nodes-00000.parquet").write_bytes(b"half")
    save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return save_packed(rows_of([make("a", [1, 2, 3])]), tmp_path / "packed")


def test_missing_manifest_is_named(packed: Path) -> None:
    (packed / "manifest.json").unlink()
    with pytest.raises(TreepackError, match=r"has no manifest\.json; it is not a treepack directory"):
        list(read_rows(packed))


def test_damaged_manifest_is_named(packed: Path) -> None:
    (packed / "manifest.json").write_text("{")
    with pytest.raises(TreepackError, match=r"manifest\.json: is damaged"):
        list(read_rows(packed))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("version", 99, "has treepack-packed version 99; this treepack reads version 1"),
        ("format", "treepack-trie", "has the format 'treepack-trie'; expected treepack-packed"),
        ("format", "zip", "has the format 'zip'; expected treepack-packed"),
    ],
)
def test_other_versions_and_formats_are_refused(packed: Path, key: str, value: object, sentence: str) -> None:
    path = packed / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(TreepackError, match=sentence):
        list(read_rows(packed))


def test_missing_part_is_named(packed: Path) -> None:
    (packed / "part-00000.parquet").unlink()
    with pytest.raises(TreepackError, match=r"part-00000\.parquet: is missing"):
        list(read_rows(packed))


def test_truncated_part_is_named(packed: Path) -> None:
    path = packed / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TreepackError, match=r"part-00000\.parquet: has \d+ bytes, its manifest lists \d+"):
        list(read_rows(packed))


def test_altered_part_is_named(packed: Path) -> None:
    path = packed / "part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # the size stays, so only the sha256 shows the change
    path.write_bytes(data)
    with pytest.raises(TreepackError, match=r"part-00000\.parquet: was altered since it was written"):
        list(read_rows(packed))


@pytest.mark.parametrize(("column", "value"), [("total_weight", 99.0), ("num_pairs", 7), ("num_tokens", 1)])
def test_stored_sums_must_match(packed: Path, column: str, value: float) -> None:
    path = packed / "part-00000.parquet"
    table = pq.read_table(path)
    index = table.column_names.index(column)
    pq.write_table(
        table.set_column(index, table.schema.field(column), pa.array([value], table.schema.field(column).type)), path
    )
    # A manifest that fits the changed part: only the other columns of the row can show the change.
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["files"][0] |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (packed / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TreepackError, match=f"row 0: {column} is {value} and its other columns give"):
        list(read_rows(packed))
