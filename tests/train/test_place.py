"""The place of a run in a store: one owner, uploads of changed files, and files that could not be uploaded stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.files.remote import object_store
from treepack.files.remote import retries as patience
from treepack.files.remote.address import RemotePath
from treepack.files.remote.object_store import UnavailableError
from treepack.train.ranks import Ranks
from treepack.train.saving.place import Place, open_place

OUT = RemotePath("memory", "bucket/run")


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(patience, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(patience, "_LONGEST_PAUSE", 0.001)
    monkeypatch.setattr(patience, "OUTAGE_SECONDS", 0.2)
    store = fsspec.filesystem("memory")
    store.mkdirs("/bucket", exist_ok=True)
    yield
    store.rm("/bucket", recursive=True)


def contents() -> dict[str, bytes]:
    return {name: object_store.read_object(OUT / name) or b"" for name in object_store.list_objects(OUT)}


def write(place: Place, name: str, text: str) -> None:
    path = place.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def fail_uploads(monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[str]:
    """Let the first uploads fail, as if the store did not answer; return the list of their names."""
    original, failed = object_store.upload, list[str]()

    def upload(local: Path, path: RemotePath, **options: Any) -> None:
        if len(failed) < times:
            failed.append(path.name)
            raise UnavailableError(f"{path}: no network")
        original(local, path, **options)

    monkeypatch.setattr(object_store, "upload", upload)
    return failed


def folders(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "cache" / "runs").glob("*/*")]


def test_a_local_run_is_its_own_folder(tmp_path: Path) -> None:
    with open_place(tmp_path / "run", Ranks()) as place:
        assert place == Place(tmp_path / "run", tmp_path / "run")
        place.claim()
        place.push()
    assert not (tmp_path / "cache").exists()


def test_files_that_changed_are_uploaded_and_nothing_stays_here(tmp_path: Path) -> None:
    with open_place(str(OUT), Ranks()) as place:
        place.claim()
        write(place, "metrics.jsonl", "1\n")
        write(place, ".hidden", "")
        write(place, ".weights.partial/model", "")
        write(place, "tensorboard/events", "a")
        place.push()
        assert {name: text for name, text in contents().items() if name != "owner.json"} == {
            "metrics.jsonl": b"1\n",
            "tensorboard/events": b"a",
        }
        write(place, "metrics.jsonl", "1\n2\n")
    assert contents() == {"metrics.jsonl": b"1\n2\n", "tensorboard/events": b"a"}
    assert folders(tmp_path) == []
    with open_place(str(OUT), Ranks()) as place:
        place.claim()
        assert (place.folder / "metrics.jsonl").read_text() == "1\n2\n"


def interrupted_run() -> None:
    with open_place(OUT, Ranks()) as place:
        place.claim()
        write(place, "metrics.jsonl", "1\n")
        raise KeyboardInterrupt


def test_the_last_metrics_are_uploaded_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert contents()["metrics.jsonl"] == b"1\n"
    assert folders(tmp_path) == []


def test_an_upload_waits_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = fail_uploads(monkeypatch, times=5)
    with open_place(OUT, Ranks()) as place:
        place.claim()
        write(place, "metrics.jsonl", "1\n")
        place.push()
    assert failed == ["metrics.jsonl"] * 5
    assert contents() == {"metrics.jsonl": b"1\n"}


def short_run() -> None:
    with open_place(OUT, Ranks()) as place:
        place.claim()
        write(place, "metrics.jsonl", "1\n")


def test_files_that_cannot_be_uploaded_stay_until_they_are_removed_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_uploads(patch, times=10**9)
        with pytest.raises(TreepackError, match=r"run/metrics\.jsonl: no network; .* kept in ") as caught:
            short_run()
    (kept,) = folders(tmp_path)
    assert str(kept) in str(caught.value)
    short_run()
    assert folders(tmp_path) == [kept]
    assert (kept / "metrics.jsonl").read_text() == "1\n"


def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    with open_place(OUT, Ranks()) as place:
        runs = place.folder.parent
    (runs / "rank-0-killed").mkdir(parents=True)
    (runs / "rank-1-runs").mkdir()
    with open_place(OUT, Ranks()):
        assert not (runs / "rank-0-killed").exists()
    assert folders(tmp_path) == [runs / "rank-1-runs"]


def test_a_process_whose_run_was_continued_elsewhere_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = open_place(OUT, Ranks())
    place = old.__enter__()
    place.claim()
    write(place, "metrics.jsonl", "old\n")
    monkeypatch.setenv("TREEPACK_CACHE", str(tmp_path / "other machine"))
    with open_place(OUT, Ranks()) as newer:
        newer.claim()
        write(newer, "metrics.jsonl", "new\n")
        newer.push()
        with pytest.raises(TreepackError, match=r"bucket/run: process \d+ on .* has continued or replaced this run"):
            place.push()
    assert "has continued or replaced this run" in refusal(old.__exit__, None, None, None)
    assert contents() == {"metrics.jsonl": b"new\n"}


def test_a_store_that_is_read_only_is_refused() -> None:
    with (
        pytest.raises(TreepackError, match=r"hf://datasets/a/b: hf:// is read only"),
        open_place("hf://datasets/a/b", Ranks()),
    ):
        pass
