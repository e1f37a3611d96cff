"""A lack of memory as one sentence, on a GPU and on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from treepack.errors import TreepackError

LOADING = ("while the model was loaded", "free the memory that other processes use there, or give another --device")
"""Place and remedy of `memory_errors` for a model that is loaded in one process."""


@contextmanager
def memory_errors(place: str, remedy: str) -> Iterator[None]:
    """Turn a lack of memory into the TreepackError "out of memory PLACE; REMEDY".

    Raises:
        TreepackError: if memory ran out in the block.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_memory_error(error):
            raise
        raise TreepackError(f"out of memory {place}; {remedy}") from error


def is_memory_error(error: BaseException) -> bool:
    """Return True if an allocation failed, on a GPU or on the CPU."""
    # The CPU allocator of torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
