"""Tries built by shares as tasks are those of one process, byte for byte; a command that starts again continues."""

from __future__ import annotations

import filecmp
import gzip
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import strategies
from support.pickled_scheduler import PickledScheduler
from support.refusal import refusal
from treepack import BuildOptions, TreepackError, build_trie_directory
from treepack.cluster.build import build_trie_on
from treepack.cluster.scheduler import LocalScheduler
from treepack.files import parts as file_parts
from treepack.files.remote.address import as_path
from treepack.files.remote.cache import local_copy
from treepack.ingest.read_log import PREFIX
from treepack.ingest.readers.copies import COPY
from treepack.trie.builders import trie_parts
from treepack.trie.store import trie_files
from treepack.trie.store.trie_files import read_trie

SAMPLES = Path(__file__).parents[2] / "sample_data"


def same_bytes(out: Path, expected: Path) -> None:
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    assert filecmp.cmpfiles(out, expected, names, shallow=False) == (names, [], [])
    assert not out.with_name(f".{out.name}.shares").exists()


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
    num_files=st.integers(1, 4),
    share_bytes=st.sampled_from([1, 250, 10_000]),
    draw=st.randoms(use_true_random=False),
)
def test_any_shares_give_the_bytes_of_one_process(
    made: list[list[int]], share: str, num_files: int, share_bytes: int, draw: random.Random
) -> None:
    records = [
        {
            # Names such as a@f.jsonl:1 and a#2 are those that equal ids get.
            "id": draw.choice(["a", "a#2", "b", "b@f0.jsonl:1", f"c{i}", f"c{i}"]),
            "input_ids": tokens,
            # Nothing is trained in some rollouts, so some shares are empty.
            "loss_mask": [0] + [draw.choice([1, 1, 0]) for _ in tokens[1:]],
            "group_id": draw.choice(["", "g", "h", "h\0", "\N{EURO SIGN}"]),
            "step": draw.choice([None, -2, 0, 1]) if draw.random() < 0.5 else None,
        }
        for i, tokens in enumerate(made)
    ]
    records.append({"id": "last", "input_ids": [1, 1], "loss_mask": [0, 1], "group_id": "h"})
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.chdir(folder)  # so that sources are as short as the ids above
        files = [f"f{i}.jsonl" for i in range(num_files)]
        for i, file in enumerate(files):
            Path(file).write_bytes(as_lines(records[i::num_files]) or as_lines(records[-1:]))
        options = BuildOptions(share=share)
        build_trie_directory(files, folder / "one", options)
        build_trie_on(PickledScheduler(), files, folder / "out", options, share_bytes=share_bytes)
        same_bytes(folder / "out", folder / "one")


@pytest.mark.parametrize("share", ["all", "group", "none"])
def test_files_of_all_kinds_give_the_bytes_of_one_process(
    tmp_path: Path, inputs: Path, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (file_parts, trie_files, trie_parts):
        monkeypatch.setattr(module, "PART_TOKENS", 500)
    options = BuildOptions(share=share)
    one = build_trie_directory([inputs], tmp_path / "one", options)
    on = build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", options, share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")
    assert len(on.manifest["files"]) > 6
    assert on.log == one.log
    assert on.log.num_skipped


def test_copies_and_steps_of_paths_are_those_of_one_process(tmp_path: Path) -> None:
    for folder in ("run/step_1", "run/step_2", "copies/step_2", "unknown/a", "unknown/b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        made = [each | {"step": None, "reward": 1.0} for each in rollouts(40, seed=int(folder[-1] == "2"))]
        lines = as_lines([{"colour": "red"}] * 9 if folder.startswith("unknown") else made)
        (tmp_path / "in" / folder / "r.jsonl").write_bytes(lines)
    one = build_trie_directory([tmp_path / "in"], tmp_path / "one")
    on = build_trie_on(PickledScheduler(), [tmp_path / "in"], tmp_path / "on", share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")
    assert on.log == one.log
    assert on.log.counts[PREFIX + COPY] == 1
    assert set(read_trie(tmp_path / "on").trajectories["step"].to_pylist()) == {1, 2}


def session(name: str, answers: list[str], own: str) -> bytes:
    """A session of Claude Code: lines with the ids and texts of `answers`, as of a fork, and then its own answer."""
    lines, parent = [], None
    for number, text in enumerate([*answers, own]):
        for role, content in (("user", f"ask {text}"), ("assistant", [{"type": "text", "text": text}])):
            uuid = f"{role}-{text}"
            message = {"role": role, "content": content}
            if role == "assistant":
                message |= {"id": f"msg-{text}", "model": "m", "type": "message", "stop_reason": "end_turn"}
            lines.append(
                {"type": role, "uuid": uuid, "parentUuid": parent, "sessionId": name, "version": "2.0", "cwd": "/"}
                | {"timestamp": f"2026-01-02T03:04:{number:02}.000Z", "message": message}
            )
            parent = uuid
    return as_lines(lines)


@pytest.mark.parametrize("share_bytes", [1, 1500, 1 << 20])
def test_answers_that_sessions_of_other_shares_have_are_trained_once(tmp_path: Path, share_bytes: int) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    said = [f"answer number {number}" for number in range(5)]
    for number, copied in enumerate([[], [], said[:1], said[:2], said[:3]]):
        (folder / f"{number}.jsonl").write_bytes(session(f"s{number}", copied, said[number]))
        if number % 2:  # files of other kinds between
            (folder / f"{number}-tokens.jsonl").write_bytes(as_lines(rollouts(20, seed=number)))
    options = BuildOptions(tokenizer=str(SAMPLES / "tokenizer"))
    one = build_trie_directory([folder], tmp_path / "one", options)
    on = build_trie_on(PickledScheduler(), [folder], tmp_path / "on", options, share_bytes=share_bytes)
    same_bytes(tmp_path / "on", tmp_path / "one")
    assert on.log == one.log
    assert on.log.counts["turns that were copied from another session not trained"] == 3


def test_tries_and_rollouts_are_inputs_together(tmp_path: Path, inputs: Path) -> None:
    files = sorted(path for path in inputs.rglob("*") if path.name in ("a.jsonl", "b.parquet", "c.json", "d.jsonl.gz"))
    for number, path in enumerate(files):
        build_trie_directory([path], tmp_path / f"{number}")
    build_trie_directory(files, tmp_path / "one")
    mixed = [tmp_path / "0", files[1], files[2], tmp_path / "3"]
    build_trie_on(PickledScheduler(), mixed, tmp_path / "on", share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")
    # A trie of a cluster grows, too.
    build_trie_on(PickledScheduler(), files[:2], tmp_path / "half", share_bytes=1)
    build_trie_directory([tmp_path / "half", *files[2:]], tmp_path / "grown")
    same_bytes(tmp_path / "grown", tmp_path / "one")


def test_damaged_records_and_files_are_counted_as_in_one_process(tmp_path: Path, inputs: Path) -> None:
    with (inputs / "a.jsonl").open("ab") as file:
        file.write(b'{"id": \n' + as_lines(rollouts(3, seed=1)) + b"[1]\n" + b" " * (1 << 20) + b"{}\n")
        file.write(as_lines(rollouts(3, seed=2)))
    (inputs / "broken.parquet").write_bytes((inputs / "b.parquet").read_bytes()[:2000])
    (inputs / "empty.jsonl").write_bytes(b"")
    options = BuildOptions(skip_bad=True, max_record_size=1 << 20)
    build_trie_directory([inputs], tmp_path / "one", options)
    build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", options, share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")


class Stopped(PickledScheduler):
    """A scheduler whose command is ended after so many tasks and one that is in flight."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def run(self, function: Any, calls: Any) -> Iterator[Any]:
        for result in super().run(function, calls):
            if not self.after:
                raise KeyboardInterrupt
            self.after -= 1
            yield result


def stop(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("after", range(5))
def test_a_command_that_starts_again_builds_the_rest(
    tmp_path: Path, inputs: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_trie_directory([inputs], tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        build_trie_on(Stopped(after), [inputs], tmp_path / "on", share_bytes=1)
    assert not (tmp_path / "on").exists()
    (shares,) = tmp_path.glob(".on.shares")
    records = {path: path.stat().st_mtime_ns for path in shares.glob("*.json")}
    assert len(records) == after + 1
    # A second end, while the tries are merged.
    with monkeypatch.context() as patch:
        patch.setattr("treepack.cluster.build.provenance_of", stop)
        with pytest.raises(KeyboardInterrupt):
            build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", share_bytes=1)
    assert {path: path.stat().st_mtime_ns for path in shares.glob("*.json")}.items() >= records.items()
    assert len([*shares.glob("*.json")]) == 5
    build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")


def test_a_file_that_changed_meanwhile_is_built_again(tmp_path: Path, inputs: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_trie_on(Stopped(4), [inputs], tmp_path / "on", share_bytes=1)
    (inputs / "a.jsonl").write_bytes(as_lines(rollouts(30, seed=3)))
    build_trie_directory([inputs], tmp_path / "one")
    build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")


def test_other_options_do_not_find_the_shares_of_a_stopped_command(tmp_path: Path, inputs: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_trie_on(Stopped(4), [inputs], tmp_path / "on", share_bytes=1)
    options = BuildOptions(share="group", format="tokens", skip_bad=True)
    build_trie_directory([inputs], tmp_path / "one", options)
    build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", options, share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")


def test_a_session_that_was_added_before_the_finished_shares_has_the_answers(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number + 1}.jsonl").write_bytes(session(f"s{number}", [], f"said {number}"))
    options = BuildOptions(tokenizer=str(SAMPLES / "tokenizer"))
    with pytest.raises(KeyboardInterrupt):
        build_trie_on(Stopped(3), [folder], tmp_path / "on", options, share_bytes=1)
    (folder / "0.jsonl").write_bytes(session("s", [], "said 1"))
    build_trie_directory([folder], tmp_path / "one", options)
    on = build_trie_on(PickledScheduler(), [folder], tmp_path / "on", options, share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")
    assert on.totals["num_trajectories"] == 2


def test_attempts_side_by_side_change_nothing(tmp_path: Path, inputs: Path) -> None:
    class Twice(PickledScheduler):
        def run(self, function: Any, calls: Any) -> Iterator[Any]:
            for result, call in zip(super().run(function, calls := list(calls)), calls, strict=True):
                for record in call[1].folder.glob("*.json"):
                    record.unlink()  # as if the other attempt was not finished when this one began
                assert (function(*call).trie is None) == (result.trie is None)
                yield result

    build_trie_directory([inputs], tmp_path / "one")
    build_trie_on(Twice(), [inputs], tmp_path / "on", share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")


@pytest.mark.parametrize("share_bytes", [None, 1])
def test_a_failed_task_leaves_no_output_but_finished_shares(
    tmp_path: Path, inputs: Path, share_bytes: int | None
) -> None:
    with (inputs / "b.jsonl").open("w") as file:
        file.write("{\n")
    assert "b.jsonl:1: " in refusal(
        build_trie_on, PickledScheduler(), [inputs], tmp_path / "on", share_bytes=share_bytes
    )
    left = {".on.shares"} if share_bytes else set()
    assert {path.name for path in tmp_path.iterdir()} - {".on.lock"} == {"inputs"} | left
    (inputs / "b.jsonl").unlink()
    build_trie_on(PickledScheduler(), [inputs], tmp_path / "on", share_bytes=share_bytes)
    build_trie_directory([inputs], tmp_path / "one")
    same_bytes(tmp_path / "on", tmp_path / "one")


@pytest.mark.parametrize("pattern", ["in", "in/*", "in/**/*.jsonl"])
def test_hidden_outputs_are_no_input(tmp_path: Path, pattern: str, store: Any) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.jsonl").write_bytes(as_lines(rollouts(30, seed=number)))
    store.put(str(tmp_path / "in"), "/bucket/in", recursive=True)
    for place in (str(tmp_path), "memory://bucket"):
        inputs, out = [f"{place}/{pattern}"], f"{place}/in/out"
        with pytest.raises(KeyboardInterrupt):
            build_trie_on(Stopped(1), inputs, out, share_bytes=1)
        # Its own unfinished output, and the shares of the command before.
        one = build_trie_directory(inputs, f"{place}/one")
        on = build_trie_on(PickledScheduler(), inputs, out, share_bytes=1)
        assert on.manifest == one.manifest
        assert on.num_files == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a.json": b'{"colour": 1}', "b.json": b'{"colour": 2}'}, r"a\.json.*no known format"),
        ({"a.jsonl": b'{"input_ids": [1, 2], "loss_mask": [0, 0]}\n'}, "nothing to build; skipped: "),
        (
            {
                "a.jsonl": b'{"input_ids": [1, 2], "loss_mask": [0, 0]}\n',
                "b.json": b'{"colour": 2}',
                "c.jsonl": b'{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}\n',
            },
            "nothing to build; skipped: ",
        ),
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
    for share_bytes in (None, 1):
        with pytest.raises(TreepackError, match=message) as error:
            build_trie_on(PickledScheduler(), [folder], tmp_path / "on", share_bytes=share_bytes)
        with pytest.raises(TreepackError, match=message) as expected:
            build_trie_directory([folder], tmp_path / "on")
        assert str(error.value) == str(expected.value)


def test_wrong_calls_are_refused(tmp_path: Path, inputs: Path) -> None:
    assert "expected at least 1" in refusal(build_trie_on, LocalScheduler(), [inputs], tmp_path / "on", share_bytes=0)
    assert "standard input cannot be read by other machines" in refusal(
        build_trie_on, LocalScheduler(), ["-"], tmp_path / "on"
    )
    assert "keep_routes builds the trie on one machine" in refusal(
        build_trie_on, LocalScheduler(), [inputs], tmp_path / "on", BuildOptions(keep_routes=True)
    )


def test_files_and_folders_that_a_machine_does_not_see_are_refused(tmp_path: Path, inputs: Path) -> None:
    class Elsewhere(PickledScheduler):
        def __init__(self, before: Any, after: Any) -> None:
            super().__init__()
            self.before, self.after = before, after

        def run(self, function: Any, calls: Any) -> Iterator[Any]:
            self.before()
            yield from [*super().run(function, calls)]
            self.after()

    def move(old: Path, new: Path) -> Any:
        return lambda: old.exists() and old.rename(new)

    shares, hidden = tmp_path / ".on.shares", tmp_path / "hidden"
    for before, after, sentence in (
        (move(inputs / "a.jsonl", hidden), int, r"a\.jsonl: a worker does not see this file; give an address"),
        (move(shares, hidden / "shares"), int, "a worker does not see this folder of --out; give an address"),
        (int, move(shares, hidden / "more"), "a worker wrote it, but this machine does not see it; give --out an"),
    ):
        with pytest.raises(TreepackError, match=sentence):
            build_trie_on(Elsewhere(before, after), [inputs], tmp_path / "on", share_bytes=1 << 20)
        if hidden.is_file():
            hidden.rename(inputs / "a.jsonl")
        hidden.mkdir(exist_ok=True)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/bucket", recursive=True)


def test_objects_are_read_and_written_by_the_tasks(tmp_path: Path, inputs: Path, store: Any) -> None:
    store.put(str(inputs), "/bucket/in", recursive=True)
    address = "memory://bucket/in"
    build_trie_directory([address], "memory://bucket/one")
    with pytest.raises(KeyboardInterrupt):
        build_trie_on(Stopped(2), [address], "memory://bucket/in/on", share_bytes=1)
    assert sum(name.endswith(".json") for name in store.find("/bucket/in/.on.shares")) >= 3
    for out in ("memory://bucket/on", "memory://bucket/in/on"):
        on = build_trie_on(PickledScheduler(), [address], out, share_bytes=1)
        contents = []
        for place in (out, "memory://bucket/one"):
            copy = local_copy(as_path(place))
            contents.append({path.name: path.read_bytes() for path in copy.iterdir()})
        manifests = [json.loads(each["manifest.json"]) for each in contents]
        assert manifests[0] == manifests[1]
        assert contents[0] == contents[1]
        if out.endswith("in/on"):
            assert not [name for name in store.find("/bucket") if ".shares" in name]
        assert {each.source.partition("in/")[0] for each in on.log.skipped} == {"memory://bucket/"}


def test_checkpoints_of_a_session_in_a_store_train_each_answer_once(tmp_path: Path, store: Any) -> None:
    for number, letters in enumerate(("aB", "aBcD", "aBcDeF")):
        history = [
            {"role": "user" if name.islower() else "model", "parts": [{"text": f"said {name}."}]} for name in letters
        ]
        content = json.dumps({"clientHistory": history, "toolCall": {}}).encode()
        store.pipe_file(f"/bucket/in/{number}.json", content)
    options = BuildOptions(tokenizer=str(SAMPLES / "tokenizer"))
    build_trie_directory(["memory://bucket/in"], tmp_path / "one", options)
    on = build_trie_on(PickledScheduler(), ["memory://bucket/in"], tmp_path / "on", options, share_bytes=1)
    same_bytes(tmp_path / "on", tmp_path / "one")
    assert on.totals["num_trajectories"] == 3


def test_shares_may_be_larger_than_the_cache_together_but_not_alone(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_bytes(as_lines(rollouts(300, seed=number)))
        store.pipe_file(f"/bucket/in/{number}.jsonl", as_lines(rollouts(300, seed=number)))
    build_trie_directory(["memory://bucket/in"], "memory://bucket/one")
    inputs = [f"memory://bucket/in/{number}.jsonl" for number in range(6)]
    with pytest.raises(KeyboardInterrupt):
        build_trie_on(Stopped(5), inputs, "memory://bucket/on", share_bytes=1)
    sizes = store.du("/bucket/.on.shares", total=True)
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "small"))
    monkeypatch.setenv("TREEPACK_CACHE_SIZE", str(sizes // 3))
    build_trie_on(PickledScheduler(), inputs, "memory://bucket/on", share_bytes=1)
    assert store.cat("/bucket/on/manifest.json") == store.cat("/bucket/one/manifest.json")
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "smaller"))
    monkeypatch.setenv("TREEPACK_CACHE_SIZE", str(sizes // 12))
    assert "TREEPACK_CACHE_SIZE" in refusal(
        build_trie_on, PickledScheduler(), inputs, "memory://bucket/more", share_bytes=1
    )


@pytest.mark.parametrize(
    ("format_", "name", "content"),
    [
        (
            "verifiers-results",
            "results.jsonl",
            as_lines([{"task": "x", "example_id": 0, "prompt": [], "completion": [], "reward": 1.0}]),
        ),
        ("opencode", "storage/session/p/s.json", b'{"id": "s", "projectID": "p", "directory": "/", "time": {}}'),
    ],
)
def test_a_format_with_files_beside_it_needs_a_shared_folder(
    tmp_path: Path, store: Any, format_: str, name: str, content: bytes
) -> None:
    store.pipe_file(f"/bucket/in/{name}", content)
    assert f"format {format_} needs other files of its folder" in refusal(
        build_trie_on, PickledScheduler(), ["memory://bucket/in"], tmp_path / "on", BuildOptions(format=format_)
    )
