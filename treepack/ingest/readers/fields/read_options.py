"""Options of reading that hold for all records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treepack.files.input_files.limits import DEFAULT_LIMITS, RecordLimits
from treepack.ingest.column_map import ColumnMap


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of the caller for all records."""

    format: str = "auto"  # the name of the format of all files, or auto to recognise it by content
    reward_key: str | None = None  # selects one reward of several in an object
    vocab_size: int | None = None  # exclusive bound of the token ids
    train_all: bool = False  # train every token of a record that has neither a mask nor a separate response
    # Accept formats with the lengths and shared prefixes of rollouts but without tokens or text; token ids are then
    # placeholders.
    shapes: bool = False
    limits: RecordLimits = DEFAULT_LIMITS
    keep_routes: bool = False  # keep recorded routes, see `tokens.route_fields`
    harmless: frozenset[str] = frozenset()  # fields that are metadata although an answer or a mask may have their names
    failed: Sequence[str] = ()  # `Format.failed` of the format that is read
    columns: ColumnMap | None = None  # maps records of a homemade layout, see `readers.columns`
    # The file of each line of a model that was read so far in sessions; None if files are read apart.
    turns: dict[str, str] | None = field(default=None, compare=False)
