"""Files that are read with another file: the result of a trial next to its log, the simulations next to their summary.

    logs/run-7/agent/trajectory.json  --companion_path(record, "../result.json")-->  logs/run-7/result.json

The search of a folder also finds such a file alone. The reader then recognises it and skips it, because it is read with
its record.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treepack.files.input_files.inputs import STDIN
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record, folder_and_stem

_ENDINGS = ("", ".gz", ".zst")  # in this order: the plain file wins


def companion_path(record: Record, name: str) -> Path | None:
    """Return the path of the file `name` in the folder of `record`, plain or compressed, or None if it is missing."""
    if record.path == STDIN:  # standard input is in no folder
        return None
    folder = Path(record.path).parent
    return next((path for ending in _ENDINGS if is_file(path := folder / (name + ending))), None)


def is_file(path: Path) -> bool:
    """Return True if there is a file at `path`."""
    try:
        return path.is_file()
    except OSError:  # a damaged record may name a file with more characters than a name may have
        return False


def folder_and_document(record: Record) -> tuple[str, str]:
    """Return the names of the folder and of the file, without extensions, of the only record of a file."""
    # Without "[0]" in the source, so that a file with an array of one record has the same name as a document.
    return folder_and_stem(replace(record, source=record.path))


def read_document(path: Path) -> dict[str, Any]:
    """Return the one JSON document of the file at `path`.

    Raises:
        TreepackError: the file is unreadable or not a JSON object.
    """
    return next(read_records(str(path))).value
