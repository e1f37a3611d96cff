"""values.json, the record of a fitted predictor, which is written last; read without torch.

`predictor.model` describes the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError

FORMAT, VERSION = "treepack-values", 1
RECORD, HEAD, METRICS = "values.json", "head.safetensors", "metrics.jsonl"


def read_values_record(directory: Path) -> dict[str, Any]:
    """Return the content of values.json.

    Raises:
        TreepackError: the file is missing or damaged, or has another format or version.
    """
    path = directory / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record["format"], record["version"]
        # Every entry that is used later is read here once, so that a record without it is refused in one place.
        entries = [(entry["name"], entry["bytes"], entry["sha256"]) for entry in record["files"]]
        tokenizer = record["tokenizer"] is None or str(record["tokenizer"]["sha256"])
        options = str(record["options"]["segment"]), int(record["options"]["capacity"])
        complete = bool(tokenizer and all(options) and HEAD in {name for name, *_ in entries})
    except OSError as error:
        raise TreepackError(
            f"{path}: cannot be read ({error.strerror}); expected a directory that treepack values fit wrote"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); fit the predictor again") from error
    if version != (FORMAT, VERSION):
        raise TreepackError(f"{path}: holds {version[0]} version {version[1]}; expected {FORMAT} version {VERSION}")
    if not complete:
        raise TreepackError(f"{path}: is damaged (an entry is missing); fit the predictor again")
    return dict(record)
