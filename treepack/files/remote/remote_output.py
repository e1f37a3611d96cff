"""Outputs in an object store: complete or absent, as `files.directory` writes them on this machine.

A store has no locks and no renames. The last object of an output, such as manifest.json, decides: without it the prefix
is unfinished, and no reader accepts it.

    observed(out)      look at `out` once, before any work
    parts              to their final prefix as soon as each is closed; the local copy is deleted
    manifest.json      last, on condition that it is as it was observed: absent (If-None-Match) or unchanged (If-Match)

Of several writers that observed the same state one wins, and the others get one sentence. A part of a loser never
replaces one of the winner, because the name of a part depends on its content and on the manifest that was observed:

    part-00000.parquet --> part-00000-1f2e3d4c5b6a7988.parquet

With `overwrite` a reader finds the old manifest and the old parts, or the new manifest and the new parts. The old parts
are deleted after that, and so are the parts that a killed run, or a loser, had left before the new manifest.

Directories with files of fixed names (a fitted predictor) have the object `.unfinished`, a list of these names, during
the upload, and the old record is deleted first. Two writers of such a prefix at once are refused if one has finished
before the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from treepack.errors import TreepackError
from treepack.files.remote import object_store
from treepack.files.remote.address import RemotePath
from treepack.files.remote.cache_room import pin, remove_unused, unpin
from treepack.files.remote.object_store import ExistsError, ObjectInfo

_RECORDS = ("manifest.json", "values.json", "train.json", "run.json")
"""The objects that complete an output of treepack; of several, the first one is written last."""

UNFINISHED = ".unfinished"
_TARGET = ".treepack-target.json"  # beside the local folder of an output: its address, and the observed manifest
_PART = re.compile(r"[a-z]+-\d{5}-[0-9a-f]{16}\.parquet")


@dataclass
class _OutputState:
    """The state of an output before any work.

    Attributes:
        file: the object `out` itself.
        objects: the objects below it, by their names.
        remains: names of the objects that an unfinished upload of treepack has left.
    """

    file: ObjectInfo | None
    objects: dict[str, ObjectInfo]
    remains: set[str]

    def version(self, name: str) -> str | None:
        """Return the version of an object below the output, None if it was absent."""
        return self.objects[name].version if name in self.objects else None

    @property
    def records(self) -> list[str]:
        """The records of a complete output that are present."""
        return [name for name in _RECORDS if name in self.objects]

    @property
    def foreign(self) -> list[str]:
        """The objects that no unfinished upload of treepack has left."""
        return [name for name in self.objects if name not in self.remains]


# Outputs that are being written by the blocks that run now, see `observed`.
_OBSERVED: ContextVar[dict[RemotePath, _OutputState]] = ContextVar("observed")


@contextmanager
def observed(out: RemotePath) -> Iterator[_OutputState]:
    """Yield the state of `out` at the start of the outermost block for it, which the last write depends on.

    Raises:
        TreepackError: the store cannot be reached, denies the access, or has no such bucket.
    """
    known = _OBSERVED.get({})
    if out in known:
        yield known[out]
        return
    token = _OBSERVED.set({**known, out: output_state(out)})
    try:
        yield _OBSERVED.get()[out]
    finally:
        _OBSERVED.reset(token)


def output_state(out: RemotePath) -> _OutputState:
    """Return the state of `out` now, or at the start of the block of `observed` that runs.

    Raises:
        TreepackError: see `observed`.
    """
    known = _OBSERVED.get({})
    if out in known:
        return known[out]
    objects = object_store.list_objects(out)
    return _OutputState(object_store.info(out), objects, _remains(out, objects))


def _remains(out: RemotePath, objects: Mapping[str, ObjectInfo]) -> set[str]:
    """Return the names of the objects that unfinished uploads have left: parts, the marker, and the files it lists."""
    remains = {name for name in objects if _PART.fullmatch(name)}
    if UNFINISHED in objects:
        lines = (object_store.read_object(out / UNFINISHED) or b"").decode("utf-8", "replace").splitlines()
        remains |= {UNFINISHED, *lines} & objects.keys()
    return remains


def is_own_prefix(out: RemotePath, state: _OutputState) -> bool:
    """Return True if treepack wrote the complete output at `out`.

    Raises:
        TreepackError: the store cannot be reached.
    """
    return any(_is_own_record(object_store.read_object(out / name)) for name in state.records)


def holds_record(prefix: RemotePath) -> bool:
    """Return True if treepack wrote an output at `prefix`, which is not listed; False if it cannot be read."""
    with suppress(TreepackError):  # an account may have no access above its prefix
        return any(_is_own_record(object_store.read_object(prefix / name)) for name in _RECORDS)
    return False


def _is_own_record(content: bytes | None) -> bool:
    try:
        record = json.loads(content or b"")
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and str(record.get("format")).startswith("treepack-")


@contextmanager
def remote_directory(out: RemotePath) -> Iterator[Path]:
    """Yield an empty local directory, and upload its remaining files if the block ends without an exception.

    Raises:
        ExistsError: another process has written `out` since it was observed.
        TreepackError: the store or the disk fails.
    """
    with observed(out) as state, _local_folder(out) as folder:
        target = {"scheme": out.scheme, "path": out.path, "observed": state.version(_RECORDS[0])}
        (folder / _TARGET).write_text(json.dumps(target), encoding="utf-8")
        output = folder / "output"
        output.mkdir()
        yield output
        _finish(out, output, state)
        # A later block inside of the same outer one starts from here.
        state.objects, state.remains = object_store.list_objects(out), set()


@contextmanager
def remote_file(out: RemotePath, *, overwrite: bool) -> Iterator[Path]:
    """Yield a local path whose file is uploaded to `out` if the block ends without an exception.

    Raises:
        ExistsError: `out` exists without `overwrite`, or another process has written it since it was observed.
        TreepackError: the store or the disk fails.
    """
    with observed(out) as state, _local_folder(out) as folder:
        local = folder / "output"
        yield local
        expected = state.file.version if overwrite and state.file is not None else None
        object_store.upload(local, out, expected=expected)
        state.file = object_store.info(out)


def publish(part: Path, sha256: str) -> str:
    """Upload a finished part of a remote output, and delete the local file; do nothing for a local output.

    Args:
        part: a file in the directory of `remote_directory`, or of a local output.
        sha256: the hash of its content in hex.

    Returns:
        the name of the file, or that of the object.

    Raises:
        TreepackError: the store fails.
    """
    content = target_of(part.parent)
    if content is None:
        return part.name
    target = json.loads(content)
    seal = hashlib.sha256(f"{sha256} {target['observed'] or ''}".encode()).hexdigest()[:16]
    name = f"{part.stem}-{seal}{part.suffix}"
    object_store.upload(part, RemotePath(target["scheme"], target["path"]) / name)
    part.unlink()
    return name


def target_of(folder: Path) -> bytes | None:
    """Return the address and state of the output that the files of `folder` go to; None for a local output."""
    try:
        return folder.with_name(_TARGET).read_bytes()
    except FileNotFoundError:
        return None


def is_remote_folder(folder: Path) -> bool:
    """Return True if the files of `folder` go to an object store."""
    return target_of(folder) is not None


def with_target(folder: Path, target: bytes) -> Path:
    """Return a new folder in `folder` from which `publish` uploads parts to the output `target`."""
    (folder / _TARGET).write_bytes(target)
    output = folder / "output"
    output.mkdir()
    return output


@contextmanager
def _local_folder(out: RemotePath) -> Iterator[Path]:
    """Yield an empty folder in TMPDIR; remove the folders that killed writers of the same output have left.

    Raises:
        TreepackError: the disk fails; the message names the output.
    """
    prefix = f"treepack-{hashlib.sha256(str(out).encode()).hexdigest()[:16]}-"
    try:
        for stale in Path(gettempdir()).glob(f"{prefix}*"):
            if stale.lstat().st_uid == os.getuid() and not stale.is_symlink():
                remove_unused(stale)
        folder = Path(mkdtemp(prefix=prefix))
        pin(folder)
        try:
            yield folder
        finally:
            unpin(folder)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise TreepackError(
            f"{out}: cannot be written, because the folder for temporary files fails ({error.strerror or error}); "
            "free some space there, or set TMPDIR to another folder"
        ) from error


def _finish(out: RemotePath, folder: Path, state: _OutputState) -> None:
    """Upload the files of `folder`, the record of the output last, and delete objects without a complete output."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    record = next((name for name in _RECORDS if name in names), None)
    assert record is not None, f"{out}: its writer has made no record"
    others = [name for name in names if name != record]
    if others:
        object_store.write(out / UNFINISHED, "".join(f"{name}\n" for name in others).encode())
        object_store.delete(out / name for name in state.records)
    else:
        # Records of two kinds would make a mixture.
        object_store.delete(out / name for name in state.records if name != record)
    for name in others:
        if object_store.info(out / record) is not None:
            raise _lost(out)
        object_store.upload(folder / name, out / name)
    content = (folder / record).read_bytes()
    parts = {name: size for name, size in _parts_of_content(content).items() if _PART.fullmatch(name)}
    present = object_store.list_objects(out)
    if any(name not in present or present[name].size != size for name, size in parts.items()):
        raise _lost(out)
    try:
        object_store.upload(folder / record, out / record, expected=None if others else state.version(record))
    except ExistsError as error:
        winner = set(_parts_of_content(object_store.read_object(out / record) or b""))
        object_store.delete(out / name for name in parts if name not in winner)
        raise _lost(out) from error
    # Only objects from before the record: later ones belong to a writer that observed the new record.
    stale = (_remains(out, present) | state.remains | set(state.objects if state.records else ())) - parts.keys()
    object_store.delete(out / name for name in sorted(stale.difference(names)) if name in present)


def _parts_of_content(content: bytes) -> dict[str, int]:
    """Return the sizes of the files that a record lists, by their names; none if it is damaged or lists none."""
    try:
        return {str(entry["name"]): int(entry["bytes"]) for entry in json.loads(content)["files"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _lost(out: RemotePath) -> ExistsError:
    return ExistsError(f"{out}: exists, because another process has just written it; choose another --out")
