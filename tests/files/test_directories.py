"""Directories: complete or absent, equal bytes for equal input, and a sentence for each kind of damage."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from support import strategies
from support.manifests import seal
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.files import directory, parts
from treepack.files.directory import finished_directory, finished_file, refuse_existing
from treepack.files.manifest import Provenance, file_sha256, read_manifest
from treepack.files.remote.address import as_path
from treepack.pack import files as packed_files
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store import trie_files
from treepack.trie.store.trie_files import read_trie, write_trie
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
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)  # type: ignore[arg-type]
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


def test_a_directory_of_somebody_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert "was not written by treepack" in refusal(refuse_existing, tmp_path / "mine", overwrite=True)


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
    # The state between the two moves of an overwrite by a process that is over: nobody has the lock.
    out.rename(tmp_path / f".trie.old-{directory._machine()}-00000000")
    assert "exists; choose another --out" in refusal(write_again, out)
    assert read_trie(out).trajectories["trajectory_id"].to_pylist() == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


def leave_partial(folder: Path, machine: str, age: float) -> Path:
    """Make the remains of a killed run, last changed `age` seconds ago."""
    left = folder / f".trie.partial-{machine}-00000000"
    left.mkdir()
    (left / "nodes-00000.parquet").write_bytes(b"half")
    for path in (left / "nodes-00000.parquet", left):
        os.utime(path, (time.time() - age,) * 2)
    return left


def test_the_next_run_removes_the_files_of_a_killed_run(tmp_path: Path) -> None:
    leave_partial(tmp_path, directory._machine(), age=0)
    save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


@pytest.mark.parametrize(("hours", "is_kept"), [(1, True), (25, False)])
def test_files_of_another_machine_are_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int, is_kept: bool
) -> None:
    # The lock may not reach other machines. A file cannot be given an old st_ctime, so the clock is moved instead.
    left = leave_partial(tmp_path, "00000000", age=0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + hours * 3600)
    save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    assert left.exists() is is_kept


def test_without_locks_files_of_this_machine_are_kept_for_a_day_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = leave_partial(tmp_path, directory._machine(), age=0)
    save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    assert left.exists()


def test_files_of_another_output_are_left_alone(tmp_path: Path) -> None:
    # "trie.partial-x" is the name of another output, whose hidden files begin like those of "trie".
    names = [".trie.partial-x.lock", f".trie.partial-x.partial-{directory._machine()}-00000000", ".trie.partial-note"]
    for name in names:
        (tmp_path / name).mkdir()
    save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    assert {path.name for path in tmp_path.iterdir()} == {*names, "trie"}


def test_an_output_that_appears_during_a_run_is_kept(tmp_path: Path) -> None:
    def make_meanwhile(out: Path, file: str) -> None:
        with finished_directory(out) as temporary:
            (temporary / "manifest.json").write_text("{}")
            out.mkdir()
            (out / file).write_text("theirs")

    def write_meanwhile(out: Path) -> None:
        with finished_file(out, overwrite=False) as temporary:
            temporary.write_text("ours")
            out.write_text("theirs")

    sentence = "exists; choose another --out or give --overwrite"
    with pytest.raises(TreepackError, match=sentence):
        make_meanwhile(tmp_path / "trie", "a")
    with pytest.raises(TreepackError, match=sentence):
        write_meanwhile(tmp_path / "table")
    assert (tmp_path / "trie" / "a").read_text() == (tmp_path / "table").read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"trie", "table"}


def test_a_rename_that_fails_inside_an_overwrite_restores_the_old_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = save_trie(build_trie([make("a", [1, 2])]), tmp_path / "trie")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert "cannot be written" in refusal(save_trie, build_trie([make("b", [3, 4])]), out)
    assert read_trie(out).trajectories["trajectory_id"].to_pylist() == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


def test_an_empty_directory_is_an_output_that_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "trie").mkdir()
    write_again(tmp_path / "trie")
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


@pytest.mark.parametrize(
    ("url", "fault"),
    {
        "hf://datasets/a/b": "hf:// is read only; choose a local --out or one in s3:// or gs://",
        "http://host/x": "http:// is not supported; expected a local path, file://, s3:// or gs://",
        "s3://": "names no bucket; write s3://BUCKET/NAME",
    }.items(),
)
def test_an_output_at_another_scheme_is_refused_by_name(
    url: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(TreepackError, match=re.escape(f"{url}: {fault}")),
        finished_directory(as_path(url) if "hf" in url else url),  # type: ignore[arg-type]
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_has_lost_a_slash_is_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "s3://bucket/trie: was given as a Path, which drops a slash; pass" in refusal(
        write_again, Path("s3://bucket/trie")
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return save_packed(rows_of([make("a", [1, 2, 3])]), tmp_path / "packed")


def test_missing_manifest_is_named(packed: Path) -> None:
    (packed / "manifest.json").unlink()
    assert "has no manifest.json, so it is no packed directory; pack rollouts with: treepack prepare" in refusal(
        list, read_rows(packed)
    )


def test_a_flip_of_any_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    # A float in exponent notation and a control character: "e" and "E", "\\u001b" and "\\u001B" are equal in JSON.
    trie = build_trie([make("a", [1, 2])])
    (tmp_path / "trie").mkdir()
    provenance = Provenance(options={"share": 1e-9, "name": "\x1b"})
    write_trie(trie, tmp_path / "trie", provenance)
    path = tmp_path / "trie" / "manifest.json"
    good = path.read_bytes()
    for place in range(len(good)):
        for bit in {5, place % 8}:  # 5 turns small letters into capitals; all eight would take ten seconds
            flipped = bytearray(good)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(TreepackError):
                read_manifest(path.parent)
    path.write_bytes(good)
    read_manifest(path.parent)


def test_the_hash_of_a_manifest_is_that_of_its_other_lines(packed: Path) -> None:
    content = (packed / "manifest.json").read_text()
    own = re.search(r'^  "sha256": "([0-9a-f]{64})",\n', content, re.MULTILINE)
    assert own is not None
    assert hashlib.sha256(content.replace(own[0], "").encode()).hexdigest() == own[1]
    (packed / "manifest.json").write_text(content.replace(own[0], ""))
    assert "sha256 is missing or wrong" in refusal(read_manifest, packed)


@pytest.mark.parametrize("name", ["../outside.parquet", "/etc/passwd", "sub/part.parquet", "..", "a\\b", ""])
def test_parts_outside_the_directory_are_refused(packed: Path, name: str) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["files"][0]["name"] = name
    seal(packed / "manifest.json", manifest)
    assert "which is not a file name of its directory" in refusal(read_manifest, packed)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("version", 99, "has treepack-packed version 99; this treepack reads version 1"),
        ("format", "zip", "has the format 'zip'; expected treepack-packed"),
    ],
)
def test_other_versions_and_formats_are_refused(packed: Path, key: str, value: object, sentence: str) -> None:
    path = packed / "manifest.json"
    seal(path, json.loads(path.read_text()) | {key: value})
    with pytest.raises(TreepackError, match=sentence):
        list(read_rows(packed))


def test_missing_part_is_named(packed: Path) -> None:
    (packed / "part-00000.parquet").unlink()
    assert "part-00000.parquet: is missing" in refusal(list, read_rows(packed))


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
    assert "part-00000.parquet: was altered since it was written" in refusal(list, read_rows(packed))


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
    seal(packed / "manifest.json", manifest)
    assert f"row 0: {column} is {value} and its other columns give" in refusal(list, read_rows(packed))
