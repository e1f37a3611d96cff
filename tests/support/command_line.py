"""The result of a run of the installed `treepack` command, for tests with the fixture `treepack`; all commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

import click


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


def every_command() -> Iterator[click.Command]:
    """Yield every command that has no commands of its own."""
    group = import_module("treepack_cli").commands
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        yield from getattr(command, "commands", {"": command}).values()
