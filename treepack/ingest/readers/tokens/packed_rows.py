"""Split rows that contain several sequences, packed one after the other by a trainer.

    input_ids    5 6 7 8 9      lengths 3, 2      =>      5 6 7      8 9
    labels       . . 7 . 9                                . . 7      . 9

A list with one value per token of the row is cut, a list with one value per sequence is split, and any other value
belongs to every sequence.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.token_fields import number_values
from treepack.ingest.readers.fields.values import shown
from treepack.ingest.readers.tokens.token_records import read_tokens
from treepack.trajectory import Outcomes, Skipped


def lengths_of(value: Any, *, name: str, num_tokens: int, source: str) -> list[int]:
    """Return the lengths of the sequences in a row of `num_tokens` tokens.

    Raises:
        TreepackError: `value` is not a list of lengths, or their sum is not `num_tokens`.
    """
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(listed, list) or not all(type(each) is int and each >= 0 for each in listed):
        raise TreepackError(f"{source}: {name} is {shown(listed)}; expected the lengths of the row's sequences")
    if sum(listed) != num_tokens:
        raise TreepackError(f"{source}: {name} sums to {sum(listed)}; expected {num_tokens}, the row's tokens")
    return list(listed)


def num_padding(positions: Any, lengths: list[int], *, source: str) -> int:
    """Count the padding tokens of the last sequence: those after a restart of its `positions`; 0 without a restart."""
    num_tokens = sum(lengths)
    if not isinstance(positions, list | np.ndarray) or len(positions) != num_tokens or not lengths:
        return 0
    # Lengths 2, 5, positions 0 1 0 1 2 0 1 -> last 0 1 2 0 1 -> restart at index 3 -> 2 padding tokens.
    last = number_values(positions[num_tokens - lengths[-1] :], source=source, name="position_ids")
    restarts = np.flatnonzero(last[1:] == 0)
    return 0 if len(restarts) == 0 else len(last) - 1 - int(restarts[0])


def read_packed(record: Record, lengths: list[int], options: ReadOptions) -> Outcomes:
    """Yield one trajectory per sequence of a row, named `<row>/sequence-<k>` from 1; the `tokens` reader reads it.

    Raises:
        TreepackError: the `tokens` reader refuses a sequence; the message names row and sequence.
    """
    num_tokens = sum(lengths)
    seen: set[str] = set()
    for number, (end, size) in enumerate(zip(accumulate(lengths), lengths, strict=True), 1):
        if size == 0:  # padding of the list of lengths; the numbers of later sequences do not change
            continue
        value = {
            name: _part(whole, end - size, end, number, num_tokens, lengths) for name, whole in record.value.items()
        }
        where = replace(record, source=f"{record.source}: sequence {number}", value=value)
        for item in read_tokens(where, options):
            if isinstance(item, Skipped):
                yield replace(item, source=record.source)
                continue
            # Without an id, the reader has named the item "r.jsonl:1: sequence 2"; the row is "r.jsonl:1".
            row = record.label if item.trajectory_id == where.label else item.trajectory_id
            # A note of the row, such as an unused field, would else count once per sequence.
            notes = tuple(note for note in item.notes if note not in seen)
            seen.update(notes)
            yield replace(item, source=record.source, trajectory_id=f"{row}/sequence-{number}", notes=notes)


def _part(whole: Any, start: int, end: int, number: int, num_tokens: int, lengths: list[int]) -> Any:
    if not isinstance(whole, list | np.ndarray):
        return whole
    # In a row whose sequences have one token each, the two lengths are equal; a list is then one value per token.
    if len(whole) == num_tokens:
        return whole[start:end]
    return whole[number - 1] if len(whole) == len(lengths) else whole
