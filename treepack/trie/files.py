"""A trie directory: `nodes-*.parquet`, `trajectories-*.parquet` and, last, `manifest.json`.

    write_trie(trie, directory)      read_trie(directory) -> Trie

Equal tries give equal bytes. Readers refuse other formats and versions, and parts that are missing or damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.address import AnyPath, as_path
from treepack.files.cache import local_copy, naming_addresses
from treepack.files.manifest import Manifest, Provenance, complete_manifest, read_manifest, write_manifest
from treepack.files.parts import PART_TOKENS, PartWriter, read_parts, token_slices
from treepack.trajectory import Int32
from treepack.trie.trie import Trie


def write_trie(
    trie: Trie,
    directory: Path,
    provenance: Provenance = Provenance(),  # noqa: B008 (immutable)
    *,
    release: Callable[[], object] | None = None,
) -> Manifest:
    """Write `trie` into an existing empty `directory`, with its manifest last; return the manifest.

    `provenance` is the rest of the manifest. `release` is called after each piece is written, so that memory-mapped
    tokens need not stay in memory.
    """
    nodes = PartWriter(directory, "nodes", schema.NODES)
    tree_id = trie.tree_id
    max_token_id = 0
    for a, b in token_slices(trie.node_length, PART_TOKENS // 8):  # an eighth of a part at a time bounds memory
        # Offsets within this piece: node_start[a:b + 1] = [40, 42, 47] -> [0, 2, 7].
        offsets = (trie.node_start[a : b + 1] - trie.node_start[a]).astype(np.int32)
        tokens = pa.array(trie.tokens[trie.node_start[a] : trie.node_start[b]])
        max_token_id = max(max_token_id, int(tokens.to_numpy().max()))
        columns = [
            tree_id[a:b],
            np.arange(a, b, dtype=np.int32),
            trie.parent[a:b],
            trie.depth[a:b].astype(np.int32),
            pa.ListArray.from_arrays(offsets, tokens),
            trie.num_passing[a:b],
        ]
        nodes.write(pa.Table.from_arrays([pa.array(c) for c in columns], schema=schema.NODES), tokens=len(tokens))
        if release is not None:
            release()
    trajectories = PartWriter(directory, "trajectories", schema.TRAJECTORIES)
    lengths = trie.lengths
    for a, b in token_slices(lengths, PART_TOKENS // 2):
        # A page ends where a chunk ends. One chunk makes the bytes independent of how the table was put together.
        trajectories.write(trie.trajectories.slice(a, b - a).combine_chunks(), tokens=int(lengths[a:b].sum()))
        if release is not None:
            release()
    entries = {
        "share": trie.share,
        "max_token_id": max_token_id,
        "files": nodes.entries() + trajectories.entries(),
    }
    return write_manifest(directory, complete_manifest(schema.TRIE_FORMAT, provenance, entries))


@naming_addresses()
def read_trie(directory: str | AnyPath) -> Trie:
    """Read a trie directory, on this machine or in an object store.

    Raises:
        TreepackError: see `read_manifest` and `check_part`.
    """
    directory = local_copy(as_path(directory))
    manifest = read_manifest(directory, schema.TRIE_FORMAT)
    nodes = read_parts(directory, manifest, "nodes", schema.NODES)
    trajectories = read_parts(directory, manifest, "trajectories", schema.TRAJECTORIES)
    chunks = nodes["tokens"].chunks
    sizes = np.concatenate([chunk.value_lengths().to_numpy() for chunk in chunks])
    parent = nodes["parent_id"].to_numpy()
    if (parent >= np.arange(len(parent))).any():
        raise TreepackError(f"{directory}: a node comes before its parent; build the trie again")
    return Trie(
        tokens=np.concatenate([chunk.flatten().to_numpy() for chunk in chunks]),
        node_start=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        node_end=_subtree_ends(parent),
        parent=parent,
        depth=nodes["depth"].to_numpy().astype(np.int64),
        num_passing=nodes["num_trajectories"].to_numpy(),
        end_node=trajectories["node_id"].to_numpy(),
        trajectories=trajectories,
        share=manifest["share"],
    )


def _subtree_ends(parent: Int32) -> Int32:
    """Return one past the last node of each subtree: parent [-1, 0, 1, 0, -1] -> [4, 3, 3, 4, 5]."""
    ends = list(range(1, len(parent) + 1))
    # From the last node to the first, each node is complete before it extends its parent.
    for node, up in zip(range(len(parent) - 1, -1, -1), reversed(parent.tolist()), strict=True):
        if up >= 0:
            ends[up] = max(ends[up], ends[node])
    return np.array(ends, np.int32)
