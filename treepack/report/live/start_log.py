"""Lines about a command before its first step, in a file beside the run, for the page of the run.

    .RUN.start    {"time": 1795768227.3, "text": "importing torch"}          a line for each part that takes long
                  {"time": 1795768241.9, "error": "out of memory ..."}       the last line of a command that fails

The directory RUN may not exist yet. The file is removed after the first step and at the end of the command. A page that
has it open still reads its last line.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from treepack.errors import first_line


def start_file(out: Path) -> Path:
    """Return the path of the lines for the run `out`; all links to `out` have one."""
    out = out.resolve()
    return out.parent / f".{out.name}.start"


class StartLog(logging.Handler):
    """The file with the lines of the logger `treepack`, until `end` or the end of the block.

    Without a place for the file, as in a folder that cannot be written, no lines are written.
    """

    def __init__(self, out: Path) -> None:
        """Prepare the lines for the run `out`; nothing is written before the block."""
        super().__init__(logging.INFO)
        self._path, self._logger = start_file(out), logging.getLogger("treepack")
        self._descriptor: int | None = None
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line."""
        self._write("text", record.getMessage())

    @property
    def is_open(self) -> bool:
        """True while there is a file for the lines."""
        return self._descriptor is not None

    def fail(self, error: BaseException) -> None:
        """Add the last line, about the error that ends the command; nothing after the first step."""
        self._write("error", first_line(error) if isinstance(error, Exception) else "interrupted")

    def end(self) -> None:
        """Remove the file: the first step is done."""
        self._logger.removeHandler(self)
        if self._descriptor is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, kind: str, text: str) -> None:
        if self._descriptor is not None:
            line = json.dumps({"time": time.time(), kind: text}) + "\n"
            with suppress(OSError):  # a full disk: the command reports it if it matters
                os.write(self._descriptor, line.encode())

    def __enter__(self) -> Self:
        # No link is followed: in a folder like /tmp somebody else may have made one to a file of ours.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError):
            self._descriptor = os.open(self._path, flags, 0o666)
            self._logger.addHandler(self)
            self._logger.setLevel(min(logging.INFO, self._level or logging.INFO))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._logger.setLevel(self._level)  # only now: other handlers show the lines after the first step
