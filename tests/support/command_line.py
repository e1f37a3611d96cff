"""The result of a run of the installed `treepack` command, for tests with the fixture `treepack`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    """Exit status and output."""

    status: int
    out: str
    err: str

    @property
    def notes(self) -> str:
        """Stderr without the last lines, about the outputs and the next command."""
        lines = self.err.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith(("written ", "next: ")))

    @property
    def json(self) -> dict[str, object]:
        result: dict[str, object] = json.loads(self.out)
        return result


Run = Callable[..., Result]
