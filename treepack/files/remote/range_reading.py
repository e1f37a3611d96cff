"""Bytes of a file from any offset on, on this machine or by range from an object store.

Hashes of the ends of two objects of equal size decide without a copy if they can be equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from treepack.files.remote import object_store
from treepack.files.remote.address import as_path

Read = Callable[[int, int], bytes]  # bytes of a file, from an offset on


@contextmanager
def range_reader(path: str) -> Iterator[Read]:
    """Yield a function that returns so many bytes of a file from an offset on, fewer at its end.

    Raises:
        OSError: a file of this machine cannot be opened or read.
        TreepackError: the object does not exist, or the store fails.
    """
    target = as_path(path)
    if not isinstance(target, Path):
        yield partial(object_store.read_range, target)
        return
    with target.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        yield lambda offset, size: os.pread(descriptor, size, offset)
