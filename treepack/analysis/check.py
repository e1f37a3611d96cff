"""Verify a trie or packed directory: `treepack stats --check` as a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treepack.analysis.needed_memory import CHECKING, refuse_too_large
from treepack.analysis.origin import read_packed_origin
from treepack.files import schema
from treepack.files.manifest import Manifest, read_manifest
from treepack.files.parts import refuse_links
from treepack.files.prepared import PACKED, prepared_part
from treepack.files.remote.address import as_path
from treepack.files.remote.cache import local_copy, naming_addresses
from treepack.pack.check import check_max_token_id, check_packed, check_totals
from treepack.pack.files import read_rows
from treepack.processes import ReportProgress, with_progress
from treepack.trie.check import check_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.token_ranges import max_token_id
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

_CHECKED_TOTALS = ("num_rows", "tokens_packed", "num_trajectories", "tokens_flat")


@naming_addresses()
def check(
    directory: str | Path,
    *,
    trie: str | Path | None = None,
    memory: int | None = None,
    progress: ReportProgress | None = None,
) -> dict[str, Any]:
    """Verify hashes, every invariant and the totals of a trie or packed directory; return its counts.

    The rows of a packed directory must also give back its trie: each trajectory exactly once, with its tokens and loss
    weights. That trie is `trie`, or the one that the manifest names. `against_trie` is False if it cannot be found. An
    output of `treepack prepare` stands for the rows in it.

    Tokens and columns that need more than `memory`, in bytes and None for `usual_memory`, are mapped from temporary
    files. The result does not depend on it.

    Raises:
        TreepackError: the first fault, naming the file, node, row or trajectory; or a trie whose nodes and trajectories
            do not fit into `memory`.
    """
    directory = local_copy(prepared_part(as_path(directory), PACKED))
    manifest = read_manifest(directory)
    refuse_links(directory, manifest)
    if manifest["format"] == schema.TRIE_FORMAT:
        whole = read_trie(directory, memory=memory, token_values=True)
        refuse_too_large(whole, CHECKING, memory=memory)
        return check_trie_totals(whole, manifest)
    origin = read_packed_origin(directory, manifest, None if trie is None else as_path(trie), memory=memory)
    if origin is not None:
        refuse_too_large(origin, CHECKING, memory=memory)
    total = manifest["totals"]["num_rows"]
    rows = with_progress(read_rows(directory), progress, "reading", unit="rows", total=total)
    check_packed(rows, manifest, origin)
    return checked_totals(manifest, against_trie=origin is not None)


def check_trie_totals(trie: Trie, manifest: Manifest | None) -> dict[str, Any]:
    """Check a trie, and its totals against `manifest` if there is one; return the numbers of trajectories and nodes."""
    check_trie(trie)
    if manifest is not None:
        check_totals(manifest["totals"], trie_totals(trie))
        check_max_token_id(manifest, max_token_id(trie))
    return {"num_trajectories": trie.num_trajectories, "num_nodes": trie.num_nodes}


def checked_totals(manifest: Manifest, *, against_trie: bool) -> dict[str, Any]:
    """Return the counts of checked rows; `against_trie` is True if their trie was compared too."""
    return {name: manifest["totals"][name] for name in _CHECKED_TOTALS} | {"against_trie": against_trie}
