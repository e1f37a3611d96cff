"""The address of a run's page, kept beside the run, so that a resumed run has its page at the same address.

.RUN.page     http://127.0.0.1:45123/TOKEN/        until the run is finished; only its owner may read it
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_MAX_BYTES = 200


class PageAddress:
    """The file with the address; without a place for it, as in a folder that cannot be written, nothing is kept."""

    def __init__(self, out: Path) -> None:
        """Take the file beside the run `out`; all links to `out` have one."""
        out = out.resolve()
        self._path = out.parent / f".{out.name}.page"

    def read(self) -> str:
        """Return the address that the last page of the run had, "" if none is known."""
        # In a folder like /tmp somebody else may have made the file or a link, who would then know the address.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), os.fdopen(os.open(self._path, flags), errors="replace") as file:
            status = os.fstat(file.fileno())
            is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
            if is_private and stat.S_ISREG(status.st_mode):
                return file.read(_MAX_BYTES).strip()
        return ""

    def write(self, address: str) -> None:
        """Keep `address`."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path, flags, 0o600), "w") as file:
                file.write(f"{address}\n")

    def remove(self) -> None:
        """Forget the address."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
