"""Manifests of rows in memory, as `write_packed` would write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from treepack.files.manifest import Manifest, Provenance
from treepack.pack.files import packed_manifest
from treepack.pack.row import Row, row_counts


def manifest_of(rows: Iterable[Row], capacity: int, semantics: str = "branch", normalize: str = "token") -> Manifest:
    """Return the manifest of `rows` without their files."""
    counted: Counter[str] = Counter()
    for row in rows:
        counted.update(row_counts(row))
    options = {"semantics": semantics, "normalize": normalize}
    return packed_manifest(counted, capacity=capacity, provenance=Provenance(options=options))
