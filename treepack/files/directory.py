"""An output directory is whole or absent.

    with finished_directory(out) as temporary:    a hidden sibling of `out`
        ...                                       everything is written there, the manifest last
                                                  then it is renamed to `out`

A run that dies leaves no `out`, or the old one; the next run removes what the dead one left beside it. `finished_file`
does so for a single file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treepack.errors import TreepackError

MANIFEST = "manifest.json"
RUN = "run.json"  # what a training run writes first; its train.json comes last


@contextmanager
def finished_directory(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `out` that becomes `out` when the block ends without an exception.

    Raises:
        TreepackError: `out` exists and is not to be overwritten or was not written by treepack, or the disk fails.
    """
    out = out.resolve()
    temporary = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)  # first, for it may put an output back that must not be overwritten unasked
        refuse_existing(out, overwrite=overwrite)
        temporary.mkdir()
        yield temporary
        _swap(temporary, out)
    except OSError as error:
        raise TreepackError(f"{out}: cannot be written ({error.strerror or error}); nothing was left behind") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def finished_file(out: Path) -> Iterator[Path]:
    """Yield a path beside `out` that is renamed to `out` when the block ends without an exception.

    Raises:
        TreepackError: the disk fails.
    """
    out = out.resolve()
    temporary = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(out)
    except OSError as error:
        raise TreepackError(f"{out}: cannot be written ({error.strerror or error}); nothing was left behind") from error
    finally:
        with suppress(OSError):  # where its directory could not be made
            temporary.unlink()


def refuse_existing(out: Path, *, overwrite: bool, inputs: Iterable[str | Path] = ()) -> None:
    """Raise a TreepackError if `out` is in the way, was not written by treepack, or would hold one of `inputs`.

    An `out` inside a treepack directory among `inputs` is refused too: that directory may be overwritten one day.
    """
    given = [Path(path) for path in inputs]
    for path in given:
        if _ours(path) and out.resolve().is_relative_to(path.resolve()) and out.resolve() != path.resolve():
            raise TreepackError(f"{out} lies inside the input {path}; choose another --out")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise TreepackError(f"{out} exists; choose another --out or give --overwrite")
    if not _ours(out):
        raise TreepackError(f"{out} exists and was not written by treepack; remove it yourself or choose another --out")
    for path in given:
        if path.resolve().is_relative_to(out.resolve()):
            raise TreepackError(f"{out} holds the input {path}, which --overwrite would remove; choose another --out")


def _ours(out: Path) -> bool:
    for name in (MANIFEST, RUN, "train.json", "values.json"):
        try:
            found = json.loads((out / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and str(found.get("format")).startswith("treepack-"):
            return True
    return False


def _swap(temporary: Path, out: Path) -> None:
    if out.exists():
        old = out.parent / f".{out.name}.old-{os.getpid()}"
        out.rename(old)
        temporary.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(out)


def _remove_stale(out: Path) -> None:
    """Remove what runs that no longer live left beside `out`, and put back an output that one had moved away."""
    for path in sorted(out.parent.glob(f".{out.name}.old-*")):
        if not _alive(path.name.rpartition("-")[2]):
            if out.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(out)
    for path in sorted(out.parent.glob(f".{out.name}.partial-*")):
        if not _alive(path.name.rpartition("-")[2]):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True
