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
    def json(self) -> dict[str, object]:
        result: dict[str, object] = json.loads(self.out)
        return result


Run = Callable[..., Result]
