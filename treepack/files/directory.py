"""Outputs that are whole or absent, and never replace anything by surprise.

    with finished_directory(out) as temporary:    a hidden sibling of `out`
        ...                                       write everything there, the manifest last
                                                  then it is renamed to `out`

A run that is killed leaves no `out`, or the old one; the next run removes what the killed one left beside it.
`finished_file` does the same for a single file. `refuse_existing` is called before any work starts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treepack.errors import TreepackError

MANIFEST = "manifest.json"
RUN = "run.json"  # written first by a training run; its train.json comes last


@contextmanager
def finished_directory(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `out` that becomes `out` if the block ends without an exception.

    Raises:
        TreepackError: `out` exists and must not be overwritten, or the disk fails.
    """
    out = out.resolve()
    temporary = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)  # before the check, because it may restore an output that must not be overwritten
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
    """Yield a path beside `out` that is renamed to `out` if the block ends without an exception.

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
        with suppress(OSError):  # its directory may be missing
            temporary.unlink()


def is_own_directory(path: Path) -> bool:
    """Return whether treepack wrote the directory `path`: a manifest, a training run or a predictor."""
    for name in (MANIFEST, RUN, "train.json", "values.json"):
        try:
            content = json.loads((path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and str(content.get("format")).startswith("treepack-"):
            return True
    return False


def refuse_existing(
    out: Path,
    *,
    overwrite: bool,
    inputs: Iterable[str | Path | None] = (),
    is_own_file: Callable[[Path], bool] | None = None,
    option: str = "--out",
) -> None:
    """Refuse an output that exists, that treepack did not write, or that contains or is inside an input.

    Args:
        out: the directory to write, or the file if `is_own_file` is given.
        overwrite: accept an existing `out` that treepack wrote.
        inputs: what the command reads; None entries are ignored.
        is_own_file: whether a file was written by this command, and may be replaced by it.
        option: name of the option for `out`, which the message contains.

    Raises:
        TreepackError: naming `out` and the remedy.
    """
    paths = [Path(path) for path in inputs if path is not None]
    for path in paths:
        inside = out.resolve().is_relative_to(path.resolve())
        if is_own_file is not None and inside:
            raise TreepackError(f"{out} is or lies inside the input {path}; choose another {option}")
        # A new directory inside a folder of rollouts is fine; one inside a trie would go when the trie is replaced.
        if inside and is_own_directory(path) and out.resolve() != path.resolve():
            raise TreepackError(f"{out} lies inside the input {path}; choose another {option}")
    if not out.exists() or (is_own_file is None and out.is_dir() and not any(out.iterdir())):
        return
    if is_own_file is not None and out.is_dir():
        raise TreepackError(f"{out} is a directory; choose another {option}")
    if not overwrite:
        raise TreepackError(f"{out} exists; choose another {option} or give --overwrite")
    if not (is_own_file or is_own_directory)(out):
        raise TreepackError(
            f"{out} exists and was not written by treepack; remove it yourself or choose another {option}"
        )
    for path in paths:
        if path.resolve().is_relative_to(out.resolve()):
            raise TreepackError(
                f"{out} holds the input {path}, which --overwrite would remove; choose another {option}"
            )


def _swap(temporary: Path, out: Path) -> None:
    if out.exists():
        old = out.parent / f".{out.name}.old-{os.getpid()}"
        out.rename(old)
        temporary.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(out)


def _remove_stale(out: Path) -> None:
    """Remove the remains of killed runs beside `out`, and restore an output that one of them had moved away."""
    for path in sorted(out.parent.glob(f".{out.name}.old-*")):
        if not _is_alive(path.name.rpartition("-")[2]):
            if out.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(out)
    for path in sorted(out.parent.glob(f".{out.name}.partial-*")):
        if not _is_alive(path.name.rpartition("-")[2]):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)  # signal 0 only asks whether the process exists
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True
