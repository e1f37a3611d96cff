"""Tries built by tasks are those of one process: nodes, trajectories and manifest."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import strategies
from support.pickled_scheduler import PickledScheduler
from treepack import BuildOptions, TreepackError, build_trie_directory
from treepack.cluster import trie_ranges as trie_ranges
from treepack.cluster.build import build_trie_on
from treepack.files import parts as file_parts
from treepack.files.input_files import ranges
from treepack.files.manifest import read_manifest
from treepack.files.remote.address import as_path
from treepack.files.remote.cache import local_copy
from treepack.ingest.read_log import PREFIX
from treepack.ingest.readers.copies import COPY
from treepack.trie.store import trie_files
from treepack.trie.store.trie_files import read_trie

SAMPLES = Path(__file__).parents[2] / "sample_data"
ARRAYS = ("tokens", "node_start", "node_end", "parent", "depth", "num_passing", "end_node")


@pytest.fixture(autouse=True)
def _small_files_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MIN_FILE", 1)
    monkeypatch.setattr(ranges, "GROUP_BYTES", 1)
    monkeypatch.setattr(ranges, "MAX_LINES", 200)
    monkeypatch.setattr(ranges, "FIRST_LINES", 200)


def same_content(out: str | Path, expected: Path) -> None:
    """Compare everything but the files, which end elsewhere."""
    trie, other = read_trie(out), read_trie(expected)
    for name in ARRAYS:
        assert getattr(trie, name).dtype == getattr(other, name).dtype
        assert np.array_equal(getattr(trie, name), getattr(other, name)), name
    assert trie.trajectories.equals(other.trajectories, check_metadata=True)
    manifests = [read_manifest(each) for each in (out, expected)]
    manifest, other_manifest = (
        {k: v for k, v in each.items() if k not in ("files", "reading", "sha256")} for each in manifests
    )
    assert manifest == other_manifest


def rollouts(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rollouts with shared beginnings, equal tokens, equal ids, steps, and some that are skipped."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    for i in range(count):
        start = rng.choice(made)["input_ids"] if made and rng.random() < 0.7 else []
        ids = start[: rng.randrange(len(start) + 1)] + [rng.randrange(40) for _ in range(rng.randrange(1, 30))]
        if made and i % 11 == 0:
            ids = rng.choice(made)["input_ids"]
        mask = [0] * len(ids) if i % 13 == 0 else [0] + [1] * (len(ids) - 1)
        step = rng.choice([None, 1, 2])
        made.append({"id": f"r{i % 50}", "input_ids": ids, "loss_mask": mask, "group_id": f"g{i % 9}", "step": step})
    return made


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in records).encode()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    (folder / "more").mkdir(parents=True)
    made = rollouts(200)
    made[170]["temperature"] = 0.7
    (folder / "a.jsonl").write_bytes(as_lines(made[:60]))
    pq.write_table(pa.Table.from_pylist(made[60:120]), folder / "b.parquet", row_group_size=7)
    (folder / "c.json").write_text(json.dumps(made[120:140]))
    (folder / "more" / "d.jsonl.gz").write_bytes(gzip.compress(as_lines(made[140:])))
    (folder / "more" / "notes.txt").write_text("not read")
    (folder / "more" / "settings.json").write_text('{"colour": "blue"}')
    return folder


@given(
    made=strategies.sequences(max_count=9),
    share=st.sampled_from(["all", "group", "none"]),
    num_ranges=st.integers(1, 5),
    part_bytes=st.sampled_from([250, 10_000]),
    draw=st.randoms(use_true_random=False),
)
def test_any_parts_and_ranges_give_the_trie_of_one_process(
    made: list[list[int]], share: str, num_ranges: int, part_bytes: int, draw: random.Random
) -> None:
    records = [
        {
            # Names such as a@f.jsonl:1 and a#2 are those that equal ids get.
            "id": draw.choice(["a", "a#2", "b", "b@f0.jsonl:1", f"c{i}", f"c{i}"]),
            "input_ids": tokens,
            "loss_mask": [0] + [draw.choice([1, 1, 1, 0]) for _ in tokens[1:]],
            "group_id": draw.choice(["", "g", "h", "h\0", "\N{EURO SIGN}"]),
            "step": draw.choice([None, -2, 0, 1]) if draw.random() < 0.5 else None,
        }
        for i, tokens in enumerate(made)
    ]
    records.append({"id": "last", "input_ids": [1, 1], "loss_mask": [0, 1], "group_id": "h"})
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.chdir(folder)  # so that sources are as short as the ids above
        files = ["f0.jsonl", "f1.jsonl"]
        for i, file in enumerate(files):
            Path(file).write_bytes(as_lines(records[i::2]) or as_lines(records[-1:]))
        options = BuildOptions(share=share)
        build_trie_directory(files, folder / "one", options)
        build_trie_on(PickledScheduler(), files, folder / "out", options, num_ranges=num_ranges, part_bytes=part_bytes)
        same_content(folder / "out", folder / "one")


@pytest.mark.parametrize("share", ["all", "group", "none"])
def test_files_of_all_kinds_give_the_trie_of_one_process(tmp_path: Path, inputs: Path, share: str) -> None:
    options = BuildOptions(share=share)
    one = build_trie_directory([inputs], tmp_path / "one", options)
    on = build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", options, num_ranges=4, part_bytes=2000)
    same_content(tmp_path / "on", tmp_path / "one")
    assert on.log == one.log
    assert on.log.num_skipped
    assert set(on.timings) == {"survey", "read", "names", "exchange", "sort", "write", "driver"}


def test_copies_and_steps_of_paths_are_those_of_one_process(tmp_path: Path) -> None:
    for folder in ("run/step_1", "run/step_2", "copies/step_2", "unknown/a", "unknown/b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        made = [each | {"step": None, "reward": 1.0} for each in rollouts(40, seed=int(folder[-1] == "2"))]
        lines = as_lines([{"colour": "red"}] * 9 if folder.startswith("unknown") else made)
        (tmp_path / "in" / folder / "r.jsonl").write_bytes(lines)
    one = build_trie_directory([tmp_path / "in"], tmp_path / "one")
    on = build_trie_on(PickledScheduler(), [tmp_path / "in"], tmp_path / "on", part_bytes=2000)
    same_content(tmp_path / "on", tmp_path / "one")
    assert on.log == one.log
    assert on.log.counts[PREFIX + COPY] == 1
    assert set(read_trie(tmp_path / "on").trajectories["step"].to_pylist()) == {1, 2}


def test_one_range_gives_the_bytes_of_one_process(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_parts, trie_files, trie_ranges):
        monkeypatch.setattr(module, "PART_TOKENS", 500)
    build_trie_directory([inputs], tmp_path / "one")
    build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", num_ranges=1, part_bytes=2000)
    same_content(tmp_path / "on", tmp_path / "one")
    # Only a trie of one process can grow, so only it has the ids that were read and the log of reading.
    folders = [[path for path in (tmp_path / name).iterdir() if path.suffix == ".parquet"] for name in ("on", "one")]
    contents = [{path.name: path.read_bytes() for path in each if "renamed" not in path.name} for each in folders]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 6


def test_parts_of_several_ranges_have_different_names(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_parts, trie_files, trie_ranges):
        monkeypatch.setattr(module, "PART_TOKENS", 300)
    build_trie_directory([inputs], tmp_path / "one")
    on = build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", num_ranges=3, part_bytes=2000)
    same_content(tmp_path / "on", tmp_path / "one")
    assert len({entry["name"] for entry in on.manifest["files"]}) == len(on.manifest["files"]) > 6


def test_conversations_are_tokenised_in_the_tasks(tmp_path: Path) -> None:
    options = BuildOptions(tokenizer=str(SAMPLES / "tokenizer"), expand="turns")
    files = [SAMPLES / "chat.jsonl", SAMPLES / "search_tree.json"]
    build_trie_directory(files, tmp_path / "one", options)
    build_trie_on(PickledScheduler(), files, tmp_path / "on", options, num_ranges=3, part_bytes=50_000)
    same_content(tmp_path / "on", tmp_path / "one")


def test_damaged_records_and_files_are_counted_as_in_one_process(tmp_path: Path, inputs: Path) -> None:
    with (inputs / "a.jsonl").open("ab") as file:
        file.write(b'{"id": \n' + as_lines(rollouts(3, seed=1)) + b"[1]\n" + b" " * (1 << 20) + b"{}\n")
        file.write(as_lines(rollouts(3, seed=2)))
    (inputs / "broken.parquet").write_bytes((inputs / "b.parquet").read_bytes()[:2000])
    (inputs / "empty.jsonl").write_bytes(b"")
    options = BuildOptions(skip_bad=True, max_record_size=1 << 20)
    build_trie_directory([inputs], tmp_path / "one", options)
    build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", options, num_ranges=2, part_bytes=1000)
    same_content(tmp_path / "on", tmp_path / "one")


def test_no_task_has_more_than_its_part_or_its_range(tmp_path: Path, inputs: Path) -> None:
    scheduler = PickledScheduler()
    files = [inputs / "a.jsonl", inputs / "b.parquet"]
    on = build_trie_on(scheduler, files, tmp_path / "on", num_ranges=8, part_bytes=999)
    assert scheduler.num_rows["read_input_part"] < on.totals["num_trajectories"] / 4
    assert scheduler.num_rows["_sort"] < on.totals["num_trajectories"] / 3


def test_a_failed_task_leaves_no_output(tmp_path: Path, inputs: Path) -> None:
    with (inputs / "a.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(TreepackError, match=r"a\.jsonl:61: "):
        build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", part_bytes=1000)
    assert {path.name for path in tmp_path.iterdir()} <= {"inputs", ".on.lock"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a.json": b'{"colour": 1}', "b.json": b'{"colour": 2}'}, r"a\.json.*no known format"),
        ({"a.jsonl": b'{"input_ids": [1, 2], "loss_mask": [0, 0]}\n'}, "nothing to build; skipped: "),
        (
            {"a.jsonl": b'{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'},
            "tokenizer",
        ),
    ],
)
def test_input_without_a_trajectory_is_refused_as_in_one_process(
    tmp_path: Path, content: dict[str, bytes], message: str
) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    with pytest.raises(TreepackError, match=message) as error:
        build_trie_on(PickledScheduler(), [folder], tmp_path / "on")
    with pytest.raises(TreepackError, match=message) as expected:
        build_trie_directory([folder], tmp_path / "on")
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize(("num_ranges", "part_bytes"), [(0, 1), (1, 0)])
def test_numbers_below_1_are_refused(tmp_path: Path, inputs: Path, num_ranges: int, part_bytes: int) -> None:
    with pytest.raises(TreepackError, match="expected at least 1"):
        build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", num_ranges=num_ranges, part_bytes=part_bytes)


def test_standard_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match="standard input cannot be read by other machines"):
        build_trie_on(PickledScheduler(), ["-"], tmp_path / "on")


def test_a_file_that_a_worker_does_not_see_is_refused(tmp_path: Path, inputs: Path) -> None:
    class Elsewhere(PickledScheduler):
        def run(self, function: Any, calls: Any) -> Iterator[Any]:
            for path in inputs.glob("*.jsonl"):
                path.unlink()
            return super().run(function, calls)

    with pytest.raises(TreepackError, match=r"a\.jsonl: a worker does not see this file; give an address"):
        build_trie_on(Elsewhere(), [inputs], tmp_path / "on")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/bucket", recursive=True)


def test_objects_are_read_by_range_and_written_by_the_tasks(tmp_path: Path, inputs: Path, store: Any) -> None:
    store.put(str(inputs), "/bucket/in", recursive=True)
    address = "memory://bucket/in"
    build_trie_directory([address], tmp_path / "one")
    on = build_trie_on(PickledScheduler(), [address], "memory://bucket/on", num_ranges=3, part_bytes=2000)
    same_content(local_copy(as_path("memory://bucket/on")), tmp_path / "one")
    assert len(on.manifest["files"]) == 6
    assert on.log.num_skipped
    assert {text.partition("in/")[0] for text in (each.source for each in on.log.skipped)} == {"memory://bucket/"}


def test_an_object_that_is_replaced_between_tasks_is_refused(tmp_path: Path, store: Any) -> None:
    store.pipe_file("/bucket/in/a.jsonl", as_lines(rollouts(50)))

    class Replacing(PickledScheduler):
        def keep(self, function: Any, calls: Any) -> Iterator[Any]:
            store.pipe_file("/bucket/in/a.jsonl", as_lines(rollouts(50, seed=1)))
            return super().keep(function, calls)

    with pytest.raises(TreepackError, match=r"memory://bucket/in/a\.jsonl: was replaced while it was read"):
        build_trie_on(Replacing(), ["memory://bucket/in/a.jsonl"], tmp_path / "on")


def test_a_format_with_files_beside_it_needs_a_shared_folder(tmp_path: Path, store: Any) -> None:
    lines = [{"task": "x", "example_id": i, "prompt": [], "completion": [], "reward": 1.0} for i in range(3)]
    store.pipe_file("/bucket/in/results.jsonl", as_lines(lines))
    store.pipe_file("/bucket/in/metadata.json", b'{"env_id": "x"}')
    with pytest.raises(TreepackError, match=r"format verifiers-results needs other files of its folder"):
        build_trie_on(PickledScheduler(), ["memory://bucket/in"], tmp_path / "on")
