"""Manifests: of rows in memory, as `write_packed` would write them, and files with changes that fit their own hash."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from treepack.files.manifest import Manifest, Provenance
from treepack.pack.files import packed_manifest
from treepack.pack.row import Row, row_counts


def manifest_of(rows: Iterable[Row], capacity: int, semantics: str = "branch", normalize: str = "token") -> Manifest:
    """Return the manifest of `rows` without their files."""
    counted: Counter[str] = Counter()
    largest = 0
    for row in rows:
        counted.update(row_counts(row))
        largest = max(largest, *row.input_ids.tolist())
    provenance = Provenance(options={"semantics": semantics, "normalize": normalize})
    return packed_manifest(counted, capacity=capacity, provenance=provenance, entries={"max_token_id": largest})


def seal(path: Path, value: object) -> None:
    """Write `value` as the manifest `path`, with the hash that fits it if it is an object."""
    if isinstance(value, dict):
        bare = {name: entry for name, entry in value.items() if name != "sha256"}
        digest = hashlib.sha256((json.dumps(bare, indent=2, sort_keys=True) + "\n").encode()).hexdigest()
        value = bare | {"sha256": digest}
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
