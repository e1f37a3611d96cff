"""Homemade layouts, by the columns that the user names or by usual names; `readers.column_records` reads them."""

from __future__ import annotations

from treepack.ingest.readers.column_records import read_columns
from treepack.ingest.readers.columns.aliases import matches
from treepack.ingest.readers.format import LINEAGE, MASKS, REWARDS, TOKEN_IDS, Format

FORMAT = Format(
    name="columns",
    rank=640,
    program="homemade layouts: `--columns`, and usual names such as `prompt` and `response`",
    recognised_by="`--columns`, or the names in a row of [other layouts](inputs.md#other-layouts)",
    requires=matches,
    checked="none",
    used="""
        id group_id uid prompt response responses rewards instruction input context question answer query
        conversation trajectory dialog prompt_tokens response_tokens prompt_idx reward score step advantage
    """.split(),
    keeps={TOKEN_IDS, MASKS, REWARDS, LINEAGE},
    notes_unused=False,
    read=read_columns,
)
