"""Helpers of the tests of log readers: records from values, conversations among items, real files if present."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.paths import REAL
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.files.records import Record
from treepack.trajectory import Chat, Skipped, Trajectory

Read = Callable[[Record, ReadOptions], Iterator[Trajectory | Skipped]]


def real(name: str) -> Path:
    """The folder of the real rollouts `name`; if it is missing, the test is skipped."""
    path = REAL / name
    if not path.exists():
        pytest.skip(f"no real rollouts at {path}")
    return path


def read_value(read: Read, value: dict[str, Any], path: str = "runs/one/log.json") -> list[Trajectory | Skipped]:
    """The result of `read` for a file at `path` with the document `value`; the file need not exist."""
    return list(read(Record(path, path, value), ReadOptions()))


def chats(items: Iterable[Trajectory | Skipped]) -> list[tuple[Trajectory, Chat]]:
    """The conversations among `items`, with their trajectories."""
    return [(item, item.content) for item in items if isinstance(item, Trajectory) and isinstance(item.content, Chat)]


def reasons(items: Iterable[Trajectory | Skipped]) -> list[str]:
    """The reasons of the skipped items."""
    return [item.reason for item in items if isinstance(item, Skipped)]


def turns(chat: Chat) -> list[tuple[str, str, float]]:
    """Role, content and weight of each message."""
    pairs = zip(chat.messages, chat.message_weights, strict=True)
    return [(message["role"], message["content"], weight) for message, weight in pairs]
