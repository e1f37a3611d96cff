"""Small files at a path or at an address: read, write and remove them without a difference for the caller.

Such files are the records of runs, the values of tasks and the sizes of inputs. Larger inputs are copied
(`files.remote.cache`), and outputs are pushed as a whole (`files.remote.remote_output`).

Every function raises OSError if a file of this machine cannot be read or changed, and TreepackError if the store cannot
be reached or denies the access.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from treepack.files.remote import object_store
from treepack.files.remote.address import AnyPath
from treepack.files.remote.object_store import ObjectInfo


def read_stored(path: AnyPath) -> bytes | None:
    """Return the bytes of a file, or None if it does not exist."""
    if not isinstance(path, Path):
        return object_store.read_object(path)
    return path.read_bytes() if path.exists() else None


def object_info(path: AnyPath) -> ObjectInfo | None:
    """Return size and version of an object; None if it does not exist, and for every path of this machine."""
    return None if isinstance(path, Path) else object_store.info(path)


def is_stored(path: AnyPath) -> bool:
    """Return True if there is a file or an object."""
    return path.exists() if isinstance(path, Path) else object_store.info(path) is not None


def write_stored(path: AnyPath, content: bytes | memoryview) -> None:
    """Write a file, which appears whole and replaces one that is there."""
    if not isinstance(path, Path):
        object_store.write(path, bytes(content))
        return
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def remove_stored(path: AnyPath) -> None:
    """Remove a file if there is one."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
    else:
        object_store.delete([path])


def remove_folder(path: AnyPath) -> None:
    """Remove a folder and everything in it; ignore files of this machine that cannot be removed."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        object_store.delete(path / name for name in object_store.list_objects(path))


def clear_folder(folder: AnyPath, *, first: str, last: str) -> None:
    """Remove everything in a folder, `first` before and `last` after all other files, but not the folder itself.

    So a process that dies halfway leaves `last`, by which the folder is recognised, without `first`. A folder of this
    machine is made if it is not there; it may be a mount or a link.
    """
    if not isinstance(folder, Path):
        names = sorted(object_store.list_objects(folder), key=lambda name: (name != first, name == last))
        object_store.delete(folder / name for name in names)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / first).unlink(missing_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
