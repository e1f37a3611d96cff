"""Compile functions with numba, and keep the machine code in a folder that can be written.

    @compiled
    def function(...): ...      compiled at its first call in this installation, loaded at later ones

numba keeps the code beside the source file, or else in the user's cache folder. In a read-only checkout without a home
directory it can do neither, and refuses to define the function. Then a folder of this user in the temporary directory
keeps the code, and if that is impossible too, every process compiles again. NUMBA_CACHE_DIR overrides all this.

Import this module inside functions only, because numba takes about a second to load.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Return `function` compiled; the decorator of all kernels."""
    try:
        result: F = numba.njit(cache=True)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        folder = private_folder(tempfile.gettempdir)
        if folder is None:
            result = numba.njit(function)
        else:
            numba.config.CACHE_DIR = str(folder)  # for the functions after this one too
            result = numba.njit(cache=True)(function)
    return result


def private_folder(temporary_directory: Callable[[], str]) -> Path | None:
    """Return a folder that only this user can write, or None if there is none.

    It has the same name in every process of the user, so code is compiled once. Cached code is executed, so a folder
    that somebody else has made in advance, or may write, is not used.
    """
    try:
        folder = Path(temporary_directory()) / f"treepack-numba-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_private else None


@contextmanager
def compilation_reported(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` whenever the compilation of a function begins inside the block, but not if its code is cached."""

    class Listener(event.Listener):  # type: ignore[misc]  # numba has no types
        def on_start(self, event: Any) -> None:
            report()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
