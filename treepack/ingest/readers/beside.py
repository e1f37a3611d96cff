"""Files that are read with another one: the result of a trial beside its log, the simulations beside their summary.

    logs/run-7/agent/trajectory.json  --beside(record, "../result.json")-->  logs/run-7/result.json

A reader that reads such a file with its record also knows it when it is met alone in a folder, and skips it there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treepack.ingest.readers.inputs import STDIN
from treepack.ingest.readers.records import Record, folder_and_stem, read_records

ENDINGS = ("", ".gz", ".zst")


def beside(record: Record, name: str) -> Path | None:
    """The file `name` in the folder of the file of `record`, plain or compressed; None if there is none."""
    if record.path == STDIN:
        return None
    folder = Path(record.path).parent
    return next((path for ending in ENDINGS if (path := folder / (name + ending)).is_file()), None)


def folder_and_document(record: Record) -> tuple[str, str]:
    """The names of the folder and of the file, without its extensions, of a record that is alone in its file."""
    return folder_and_stem(replace(record, source=record.path))


def read_document(path: Path) -> dict[str, Any]:
    """The one JSON document that the file at `path` holds.

    Raises:
        TreepackError: unreadable or no JSON object.
    """
    return next(read_records(str(path))).value
