"""A lack of memory as one sentence with the bytes that are needed and free, on a GPU and on the CPU.

torch.OutOfMemoryError, MemoryError, ... --memory_errors, out_of_memory--> MemoryShortageError
a plan that does not fit --shortage--> the same sentence, before anything runs

out of memory in step 3 with the smallest plan (..), which needs at least 81.2 GiB, and 79.1 GiB are free; REMEDY
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from treepack.errors import TreepackError
from treepack.memory.device_memory import free_memory

LOADING = ("while the model was loaded", "free the memory that other processes use there, or give another --device")
"""Place and remedy of `memory_errors` for a model that is loaded in one process."""

_REQUEST = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)  # of both allocators of torch
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class MemoryShortageError(TreepackError):
    """A lack of memory; `place` is the place in its sentence."""

    def __init__(self, sentence: str, place: str = "") -> None:
        super().__init__(sentence)
        self.place = place


@contextmanager
def memory_errors(place: str, remedy: str) -> Iterator[None]:
    """Turn a lack of memory into the error of `out_of_memory`.

    Raises:
        MemoryShortageError: if memory ran out in the block.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_memory_error(error):
            raise
        raise out_of_memory(place, remedy, error) from error


def out_of_memory(
    place: str, remedy: str, error: BaseException, *, plan: str = "", held: int = 0
) -> MemoryShortageError:
    """Return the error about an allocation that failed with `error`; its tensors must still be there.

    Args:
        place: "in row 3 of 512 tokens".
        remedy: advice for the user.
        error: of torch or Python.
        plan: "with the smallest plan (..)", if there are plans.
        held: bytes that the computation had allocated before; 0 if they are not known.
    """
    subject, request = f"out of memory {place}{plan and f' {plan}'}", _REQUEST.search(str(error))
    on_gpu = isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available()
    free = free_memory(torch.device("cuda" if on_gpu else "cpu")) + held
    if request is None:
        return MemoryShortageError(f"{subject}, and {gib(free)} are free; {remedy}", place)
    size = int(float(request[1]) * _UNITS[request[2]])
    needed = gib(held + size) if held else f"{gib(size)} more"
    return MemoryShortageError(shortage(f"{subject}, which", needed, gib(free), remedy), place)


def shortage(subject: str, needed: str, free: str, remedy: str) -> str:
    """Return the sentence about a computation that needs more memory than is free."""
    return f"{subject} needs at least {needed}, and {free} are free; {remedy}"


def is_memory_error(error: BaseException) -> bool:
    """Return True if an allocation failed, on a GPU or on the CPU."""
    # The CPU allocator of torch raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def gib(num_bytes: float) -> str:
    """Return bytes for people: 48 MiB, 23.4 GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if abs(num_bytes) >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
