"""Lines about a training command before its first step, as the page reads them; see `report.live.start_log`.

.RUN.start --StartLines.read--> RunStart: the lines with their times, an error, and whether the file is still there
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.report.live.metrics_tail import open_regular
from treepack.report.live.start_log import start_file

_MAX_BYTES = 1 << 16
_MAX_TEXT = 1000  # characters


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a command: seconds since 1970 and text of each line, its error or "", and whether it is starting."""

    lines: tuple[tuple[float, str], ...] = ()
    error: str = ""
    is_starting: bool = False


NO_START = RunStart()


class StartLines:
    """A reader of the lines of a run, which stay known after their file is removed."""

    def __init__(self, folder: Path) -> None:
        """Read the lines beside the run `folder`; there may be none."""
        self.path = start_file(folder)
        self._descriptor: int | None = None

    def read(self) -> RunStart:
        """Return the lines of the newest command; none if a file cannot be read."""
        with suppress(OSError, TreepackError):
            exists = self._open()
            if self._descriptor is None:
                return NO_START
            records = [_parse(line) for line in os.pread(self._descriptor, _MAX_BYTES, 0).split(b"\n")]
            lines = tuple((each["time"], _shown(each["text"])) for each in records if "text" in each)
            error = next((_shown(each["error"]) for each in records if "error" in each), "")
            return RunStart(lines, error, exists and not error)
        return NO_START

    def _open(self) -> bool:
        """Open the file if it is new; return true if it exists."""
        try:
            now = self.path.lstat()
        except OSError:
            return False
        if self._descriptor is not None:
            opened = os.fstat(self._descriptor)
            if (opened.st_dev, opened.st_ino) == (now.st_dev, now.st_ino):
                return True
            os.close(self._descriptor)
            self._descriptor = None
        self._descriptor = open_regular(self.path)
        return self._descriptor is not None


def _parse(line: bytes) -> dict[str, Any]:
    """Return the record of a line, empty if it is none."""
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and type(record.get("time")) is float and 0 <= record["time"] < 1e12:
            return record
    return {}


def _shown(value: object) -> str:
    # Not `words.printable`, whose module imports much more than a look at a path needs.
    return "".join(letter if letter.isprintable() else " " for letter in str(value)[:_MAX_TEXT])
