"""Helpers of the tests of formats: readers of values, what their items contain, and real files if they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.paths import REAL
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Chat, Skipped, Tokens, Trajectory

Items = list[Trajectory | Skipped]
Read = Callable[[Record, ReadOptions], Iterator[Trajectory | Skipped]]


def real(name: str) -> Path:
    """The folder of the real rollouts `name`; if it is missing, the test is skipped."""
    path = REAL / name
    if not path.exists():
        pytest.skip(f"no real rollouts at {path}")
    return path


def read_value(read: Read, value: dict[str, Any], path: str = "runs/one/log.json") -> Items:
    """The result of `read` for a file at `path` with the document `value`; the file need not exist."""
    return list(read(Record(path, path, value), ReadOptions()))


def records_of(values: Iterable[dict[str, Any]], path: str = "r.jsonl") -> list[Record]:
    """The records of a file at `path`: `r.jsonl:1`, `r.jsonl:2`, .., or one document if it ends with json."""
    return [
        Record(path if path.endswith(".json") else f"{path}:{line}", path, value)
        for line, value in enumerate(values, 1)
    ]


def read_as(name: str, *values: dict[str, Any], path: str = "r.jsonl", **options: Any) -> list[Any]:
    """The items of the reader of format `name` for one file with these `values`; unused fields are not noted."""
    form, records = formats_by_name()[name], records_of(values, path)
    how = ReadOptions(**options, failed=form.failed)
    if form.read_file is not None:
        return list(form.read_file(iter(records), how))
    assert form.read is not None
    return [item for record in records for item in form.read(record, how)]


def read_whole(name: str, *values: dict[str, Any], path: str = "r.jsonl", **options: Any) -> list[Any]:
    """The items of the format `name` for one file with these `values`, with notes on the fields that are not used."""
    return list(formats_by_name()[name].trajectories(records_of(values, path), ReadOptions(**options)))


def refusal_as(name: str, *values: dict[str, Any], **options: Any) -> str:
    """The error of the format `name` about the first of `values`, without the place of the record."""
    with pytest.raises(TreepackError) as caught:
        read_as(name, *values, **options)
    where, _, message = str(caught.value).partition(": ")
    assert where == "r.jsonl:1"
    return message


def trajectories(items: Iterable[Trajectory | Skipped]) -> list[Trajectory]:
    """The trajectories among `items`."""
    return [item for item in items if isinstance(item, Trajectory)]


def only(items: Iterable[Trajectory | Skipped]) -> Trajectory:
    """The only one of `items`, a trajectory."""
    (item,) = items
    assert isinstance(item, Trajectory)
    return item


def chats(items: Iterable[Trajectory | Skipped]) -> list[tuple[Trajectory, Chat]]:
    """The conversations among `items`, with their trajectories."""
    return [(item, item.content) for item in trajectories(items) if isinstance(item.content, Chat)]


def chat_of(item: Trajectory | Skipped) -> Chat:
    """The conversation of `item`."""
    ((_, content),) = chats([item])
    return content


def tokens_of(item: Trajectory | Skipped) -> Tokens:
    """The token ids of `item`."""
    content = only([item]).content
    assert isinstance(content, Tokens)
    return content


def only_chat(items: Iterable[Trajectory | Skipped]) -> tuple[Trajectory, Chat]:
    """The only trajectory among `items`, beside skipped ones, and its conversation."""
    (pair,) = chats(trajectories(items))
    return pair


def reasons(items: Iterable[Trajectory | Skipped]) -> list[str]:
    """The reasons of the skipped items."""
    return [item.reason for item in items if isinstance(item, Skipped)]


def notes_of(items: Iterable[Trajectory | Skipped]) -> list[str]:
    """The notes of all trajectories among `items`."""
    return [note for item in trajectories(items) for note in item.notes]


def turns(chat: Chat) -> list[tuple[str, str, float]]:
    """Role, content and weight of each message."""
    pairs = zip(chat.messages, chat.message_weights, strict=True)
    return [(message["role"], message["content"], weight) for message, weight in pairs]


def said_in(items: Iterable[Trajectory | Skipped], between: str = " ") -> dict[str, str]:
    """The texts of each trajectory, joined; trained texts are in capital letters."""
    return {
        item.trajectory_id: between.join(
            words.upper() if weight else words.lower() for _, words, weight in turns(content)
        )
        for item, content in chats(items)
    }
