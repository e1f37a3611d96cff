"""Conversations of the samples of every format, and of real rollouts if they are beside the checkout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from support.paths import REAL, ROLLOUTS
from support.read_rollouts import read_trajectories
from treepack.errors import TreepackError
from treepack.trajectory import Chat, Trajectory

# Real rollouts, and the file with their tool schemas if they have one.
SOURCES = {
    "tau-bench-airline": ("gpt-4o-airline.json.gz", "tools.derived.json"),
    "toolbench-dfsdt": ("", None),
    "swe-agent-lite": ("", None),
}


@dataclass(frozen=True)
class Conversation:
    """A conversation as its reader gives it, and the tool schemas that go with it."""

    source: str
    item: Trajectory
    tools: list[dict[str, Any]] | None

    @property
    def chat(self) -> Chat:
        """The messages."""
        assert isinstance(self.item.content, Chat)
        return self.item.content

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The schemas that a template gets: those of the conversation, or else of its source."""
        return self.chat.tools or self.tools


def samples_of_formats() -> list[Conversation]:
    """Return every conversation of tests/rollouts."""
    return [one for path in sorted(ROLLOUTS.iterdir()) for one in _conversations(path.name, path, None)]


def real_conversations(limit: int | None = None) -> list[Conversation]:
    """Return the first `limit` conversations of each real source; none if the sources are not there."""
    conversations: list[Conversation] = []
    for source, (file, schemas) in SOURCES.items():
        if (REAL / source).is_dir():
            tools = json.loads((REAL / source / schemas).read_text(encoding="utf-8")) if schemas else None
            conversations += islice(_conversations(source, REAL / source / file, tools), limit)
    return conversations


def _conversations(source: str, path: Path, tools: list[dict[str, Any]] | None) -> Iterator[Conversation]:
    try:
        for item in read_trajectories([str(path)]):
            if isinstance(item, Trajectory) and isinstance(item.content, Chat):
                yield Conversation(source, item, tools)
    except TreepackError:  # samples of lengths without tokens, which only statistics read
        return
