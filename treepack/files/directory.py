"""Write outputs that are complete or absent, and that replace nothing unless the caller allows it.

    with finished_directory(out) as temporary:    a hidden sibling of `out`, and the lock of `out`
        ...                                       write everything there, the manifest last
                                                  then it is renamed to `out`

`finished_file` does the same for a single file. `refuse_existing` is called before any work starts, and again at the
end: without `overwrite` the rename fails if somebody else has made `out` in the meantime.

A run that is killed leaves no `out`, or the old one, and a hidden sibling that the next run removes:

    .trie.partial-1f2e3d4c-a1b2c3d4     the output of an unfinished run
    .trie.old-1f2e3d4c-5e6f7a8b         an output that a run with `overwrite` has just moved away

The first number is that of this machine since its last start, the second is random. While a process has the lock of
`out`, no other process on this machine writes it, in any container. Locks between machines depend on the file system,
so the remains of other machines are removed a day after their last change.

An output may also be an address in an object store, see `files.remote.remote_output`: `temporary` is then in TMPDIR,
and is uploaded at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treepack.errors import TreepackError
from treepack.files.lock import lock
from treepack.files.remote.address import AnyPath, as_output, as_path
from treepack.files.remote.cache import borrowed_copy
from treepack.files.remote.object_store import ExistsError
from treepack.files.remote.remote_output import (
    holds_record,
    is_own_prefix,
    observed,
    output_state,
    remote_directory,
    remote_file,
)

MANIFEST = "manifest.json"
RUN = "run.json"  # written first by a training run; its train.json comes last

_HIDDEN = re.compile(r"\..+\.(lock|shares|(partial|old)-[0-9a-f]{8}-[0-9a-f]{8})")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # equal in every container of a machine
_STALE_SECONDS = 24 * 3600.0


@contextmanager
def finished_directory(out: AnyPath, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `out` that becomes `out` if the block ends without an exception.

    If `out` is an address, the directory must contain one of `remote_output.RECORDS` at the end.

    Raises:
        TreepackError: `out` exists and must not be overwritten, another process writes it, or the disk or the store
            fails.
    """
    out = as_output(out)
    if not isinstance(out, Path):
        with observed(out):
            refuse_existing(out, overwrite=overwrite)
            with remote_directory(out) as temporary:
                yield temporary
        return
    with _temporary(out, "--out") as (out, temporary):
        refuse_existing(out, overwrite=overwrite)  # after the lock, because that may restore an old output
        temporary.mkdir()
        yield temporary
        refuse_existing(out, overwrite=overwrite)
        _swap(temporary, out)


@contextmanager
def finished_file(out: AnyPath, *, overwrite: bool, option: str = "--out") -> Iterator[Path]:
    """Yield a path beside `out` that is renamed to `out` if the block ends without an exception.

    Args:
        out: the file to write.
        overwrite: replace a file that exists at the end.
        option: name of the option for `out`, for messages.

    Raises:
        TreepackError: `out` exists at the end and must not be overwritten, another process writes it, or the disk or
            the store fails.
    """
    out = as_output(out, option=option)
    if not isinstance(out, Path):
        try:
            with remote_file(out, overwrite=overwrite) as temporary:
                yield temporary
        except ExistsError as error:
            if overwrite:
                raise TreepackError(
                    f"{out}: was written by another process meanwhile; run the command again"
                ) from error
            raise _exists(out, option) from error
        return
    with _temporary(out, option) as (out, temporary):
        yield temporary
        if overwrite:
            temporary.replace(out)
        else:
            _rename_to_new(temporary, out, option)


@contextmanager
def _temporary(out: Path, option: str) -> Iterator[tuple[Path, Path]]:
    """Yield `out` without links and a new name beside it, under the lock; a file of that name is removed at the end."""
    with lock(out, option=option) as is_locked:
        out = out.resolve()
        temporary = _hidden(out, "partial")
        try:
            _remove_stale(out, is_locked=is_locked)
            yield out, temporary
        except OSError as error:
            raise TreepackError(
                f"{out}: cannot be written ({error.strerror or error}); nothing was left behind"
            ) from error
        finally:
            _remove(temporary)


def exists(out: AnyPath) -> bool:
    """Return True if there is a file or directory `out`, or an object of this address."""
    return out.exists() if isinstance(out, Path) else output_state(out).file is not None


def is_hidden_output(name: str) -> bool:
    """Return True if `name` is that of a lock file, an unfinished output or its shares, which no command reads."""
    return _HIDDEN.fullmatch(name) is not None


def shares_beside(out: AnyPath) -> AnyPath:
    """Return the folder of the shares of an unfinished output, which tasks on other machines have built."""
    out = out.resolve() if isinstance(out, Path) else out
    return out.parent / f".{out.name}.shares"


def is_own_directory(path: Path) -> bool:
    """Return True if treepack wrote the directory `path`: it has a manifest, a training run or a predictor."""
    for name in (MANIFEST, RUN, "train.json", "values.json"):
        try:
            content = json.loads((path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and str(content.get("format")).startswith("treepack-"):
            return True
    return False


def refuse_existing(
    out: AnyPath,
    *,
    overwrite: bool,
    inputs: Iterable[str | AnyPath | None] = (),
    is_own_file: Callable[[Path], bool] | None = None,
    option: str = "--out",
) -> None:
    """Refuse an output that exists, that contains an input, or that is inside a directory that treepack wrote.

    Args:
        out: the directory to write, or the file if `is_own_file` is given.
        overwrite: accept an existing `out` that treepack wrote.
        inputs: paths that the command reads; None entries are ignored.
        is_own_file: returns True for a file that this command wrote, and may replace.
        option: name of the option for `out`, which the message contains.

    Raises:
        TreepackError: naming `out` and the remedy.
    """
    out = as_output(out, option=option)
    # Inputs and the output are compared if both are on this machine or both are in a store.
    given = [as_path(path) for path in inputs if path is not None]
    paths = [path for path in given if isinstance(path, Path) == isinstance(out, Path)]
    for path in paths:
        if is_own_file is not None and is_inside(out, path):
            raise TreepackError(f"{out} is or lies inside the input {path}; choose another {option}")
    exists, is_own = _state(out, is_own_file, option)
    refuse_inside(out, option=option)  # after a store that cannot be reached was refused
    if not exists:
        return
    if not overwrite:
        raise _exists(out, option)
    if not is_own():
        raise TreepackError(
            f"{out} exists and was not written by treepack; remove it yourself or choose another {option}"
        )
    for path in paths:
        if is_inside(path, out):
            raise TreepackError(
                f"{out} holds the input {path}, which --overwrite would remove; choose another {option}"
            )


def refuse_inside(out: AnyPath, *, option: str = "--out") -> None:
    """Refuse an output inside a directory that treepack wrote: a trie, packed rows, a run or a predictor.

    Raises:
        TreepackError: naming the directory.
    """
    folder = Path(os.path.realpath(out)).parent if isinstance(out, Path) else out.parent
    while folder != folder.parent:
        if is_own_directory(folder) if isinstance(folder, Path) else holds_record(folder):
            raise TreepackError(
                f"{out} lies inside {folder}, which treepack wrote and which must hold no other files; choose another "
                f"{option}"
            )
        folder = folder.parent


def _state(out: AnyPath, is_own_file: Callable[[Path], bool] | None, option: str) -> tuple[bool, Callable[[], bool]]:
    """Return True if an output exists, and a function that returns True if treepack wrote it.

    Raises:
        TreepackError: `out` is a directory in the place of a file.
    """
    if not isinstance(out, Path):
        state = output_state(out)
        if is_own_file is None:
            return bool(state.file or state.records or state.foreign), lambda: is_own_prefix(out, state)
        return state.file is not None, lambda: _is_own_object(out, is_own_file)
    if is_own_file is not None and out.is_dir():
        raise TreepackError(f"{out} is a directory; choose another {option}")
    exists = out.exists() and not (is_own_file is None and out.is_dir() and not any(out.iterdir()))
    return exists, lambda: (is_own_file or is_own_directory)(out)


def _is_own_object(out: AnyPath, is_own_file: Callable[[Path], bool]) -> bool:
    with borrowed_copy(out) as local:
        return is_own_file(local)


def is_inside(path: AnyPath, folder: AnyPath) -> bool:
    """Return True if `path` is `folder` or inside it; both are on this machine, or both are addresses."""
    if isinstance(path, Path) and isinstance(folder, Path):
        # Path.resolve raises on a link to itself; reading that link gives a better message.
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    return not isinstance(path, Path) and not isinstance(folder, Path) and path.is_relative_to(folder)


def _swap(temporary: Path, out: Path) -> None:
    """Move the directory `temporary` to `out`; a directory that is there is moved away, and back if that fails."""
    old = _hidden(out, "old")
    try:
        if out.exists() and any(out.iterdir()):
            out.rename(old)
        temporary.rename(out)  # fails unless `out` is absent or an empty directory
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    _remove(old)


def _rename_to_new(temporary: Path, out: Path, option: str) -> None:
    """Rename a file, and fail if `out` exists."""
    try:
        os.link(temporary, out)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise _exists(out, option) from None
    except OSError:  # a file system without hard links: look first, under the lock
        if out.exists():
            raise _exists(out, option) from None
        temporary.rename(out)


def _exists(out: AnyPath, option: str) -> TreepackError:
    return TreepackError(f"{out} exists; choose another {option} or give --overwrite")


def _hidden(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.{kind}-{_machine()}-{secrets.token_hex(4)}"


def _machine() -> str:
    """Return a number of this machine since its last start, the same in every container; random if unknown."""
    try:
        return hashlib.sha256(_BOOT_ID.read_bytes()).hexdigest()[:8]
    except OSError:
        return secrets.token_hex(4)


def _remove_stale(out: Path, *, is_locked: bool) -> None:
    """Remove the remains of killed runs beside `out`, and restore an output that one of them had moved away."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(partial|old)-([0-9a-f]{{8}})-[0-9a-f]{{8}}")
    here = _machine()
    try:
        siblings = sorted(out.parent.iterdir())
    except PermissionError:  # a folder may be writable and not readable
        return
    for path in siblings:
        match = pattern.fullmatch(path.name)
        # The lock proves that no process of this machine is writing. For other machines only the age is known.
        if match is None or not ((is_locked and match[2] == here) or _age(path) > _STALE_SECONDS):
            continue
        if match[1] == "old" and not out.exists():
            path.rename(out)
        else:
            _remove(path)


def _age(path: Path) -> float:
    """Return the seconds since the last change of `path` or of a file in it."""
    latest = 0.0
    for entry in [path, *path.rglob("*")]:
        with suppress(OSError):  # removed at this moment
            status = entry.lstat()
            latest = max(latest, status.st_mtime, status.st_ctime)  # a rename changes only st_ctime
    return time.time() - latest


def _remove(path: Path) -> None:
    """Remove a file or a directory, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
