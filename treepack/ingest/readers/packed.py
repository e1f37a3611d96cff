"""Rows in which a trainer packed several sequences one behind the other, taken apart again.

    input_ids    5 6 7 8 9      lengths 3, 2      =>      5 6 7      8 9
    labels       . . 7 . 9                                . . 7      . 9

What has one value per token of the row is cut, what has one per sequence is dealt, and the rest is of every sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import ReadOptions, shown
from treepack.ingest.readers.formats import tokens
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.token_fields import number_values
from treepack.trajectory import Skipped, Trajectory


def lengths_of(value: Any, *, name: str, num_tokens: int, source: str) -> list[int]:
    """The lengths of the sequences of a row of `num_tokens` tokens.

    Raises:
        TreepackError: no list of numbers, or one of another sum.
    """
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(listed, list) or not all(type(each) is int and each >= 0 for each in listed):
        raise TreepackError(f"{source}: {name} is {shown(listed)}; expected the lengths of the row's sequences")
    if sum(listed) != num_tokens:
        raise TreepackError(f"{source}: {name} sums to {sum(listed)}; expected {num_tokens}, the row's tokens")
    return list(listed)


def num_padding(positions: Any, lengths: list[int], *, source: str) -> int:
    """How many tokens of the last sequence are padding: those from where its `positions` begin again; 0 without any."""
    num_tokens = sum(lengths)
    if not isinstance(positions, list | np.ndarray) or len(positions) != num_tokens or not lengths:
        return 0
    last = number_values(positions[num_tokens - lengths[-1] :], source=source, name="position_ids")
    again = np.flatnonzero(last[1:] == 0)
    return 0 if len(again) == 0 else len(last) - 1 - int(again[0])


def read_packed(record: Record, lengths: list[int], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """One trajectory per sequence of a row, `<row>/sequence-<k>` from 1, by the `tokens` reader.

    Raises:
        TreepackError: what the `tokens` reader refuses, named by row and sequence.
    """
    num_tokens = sum(lengths)
    seen: set[str] = set()
    for number, (end, size) in enumerate(zip(accumulate(lengths), lengths, strict=True), 1):
        if size == 0:
            continue
        value = {name: _part(held, end - size, end, number, num_tokens, lengths) for name, held in record.value.items()}
        where = replace(record, source=f"{record.source}: sequence {number}", value=value)
        for item in tokens.read(where, options):
            if isinstance(item, Skipped):
                yield replace(item, source=record.source)
                continue
            name = f"{_named(item, where, record)}/sequence-{number}"
            notes = tuple(note for note in item.notes if note not in seen)
            seen.update(notes)
            yield replace(item, source=record.source, trajectory_id=name, notes=notes)


def _named(item: Trajectory, where: Record, record: Record) -> str:
    """The row's name: its own, or where it was read."""
    return record.label if item.trajectory_id == where.label else item.trajectory_id


def _part(held: Any, start: int, end: int, number: int, num_tokens: int, lengths: list[int]) -> Any:
    if not isinstance(held, list | np.ndarray):
        return held
    if len(held) == num_tokens:
        return held[start:end]
    return held[number - 1] if len(held) == len(lengths) else held
