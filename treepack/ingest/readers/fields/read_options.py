"""Options of reading that hold for all records."""

from __future__ import annotations

from dataclasses import dataclass

from treepack.ingest.column_map import ColumnMap
from treepack.ingest.options import MAX_RECORD_SIZE


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of the caller for all records.

    `reward_key` selects one reward of several in a dict. `vocab_size` is the exclusive bound of the token ids.
    `train_all` trains every token of a record that has neither a mask nor a separate response. `shapes` accepts formats
    with the lengths and shared prefixes of rollouts but without tokens or text; token ids are then placeholders.
    `skip_bad` skips damaged records and files, which are refused otherwise. `max_record_size` limits the bytes of a
    record, and of a file that is read as a whole. `keep_routes` keeps recorded routes, see `route_fields`. `harmless`
    are fields that are metadata although their names could be those of answers or masks. `columns` maps records of a
    homemade layout, see `readers.columns`.
    """

    reward_key: str | None = None
    vocab_size: int | None = None
    train_all: bool = False
    shapes: bool = False
    skip_bad: bool = False
    max_record_size: int = MAX_RECORD_SIZE
    keep_routes: bool = False
    harmless: frozenset[str] = frozenset()
    columns: ColumnMap | None = None
