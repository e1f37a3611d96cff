"""A trie directory: `nodes-*.parquet`, `trajectories-*.parquet` and, last, `manifest.json`.

    write_trie(trie, directory)      read_trie(directory) -> Trie

Equal tries give equal bytes. Readers refuse other formats and versions, and parts that are missing or damaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest, Provenance, complete_manifest, read_manifest, write_manifest
from treepack.files.manifest_entries import FileEntry
from treepack.files.parts import PART_TOKENS, PartWriter, token_slices
from treepack.files.remote.address import AnyPath, as_path
from treepack.files.remote.cache import local_copy, naming_addresses
from treepack.files.routes import route_columns
from treepack.memory.budget import usual_memory
from treepack.trajectory import Float64, Int32
from treepack.trie.nodes import NodeArrays, subtree_ends
from treepack.trie.shape import check_nodes
from treepack.trie.storage import ArrayStorage
from treepack.trie.store.mapped import decoded_bytes, read_nodes, read_trajectory_table
from treepack.trie.trie import Trie

# Nodes are written as slices of so many to a part, and trajectories too; this bounds memory.
SLICES, TRAJECTORY_SLICES = 8, 2
# Tokens of a slice with routes, some hundred bytes for each: a column of bytes has offsets of 32 bits.
_ROUTE_TOKENS = 1 << 18


def write_trie(
    trie: Trie,
    directory: Path,
    provenance: Provenance = Provenance(),  # noqa: B008 (immutable)
    renamed: pa.Table | None = None,
) -> Manifest:
    """Write `trie` into an existing empty `directory`, with its manifest last; return the manifest.

    `provenance` is the rest of the manifest, and `renamed` a table of `schema.RENAMED`.
    """
    values, routes = trie.token_values, trie.routes
    names = [*([] if values is None else schema.NODE_VALUES.names), *([] if routes is None else schema.ROUTES.names)]
    nodes = PartWriter(directory, "nodes", schema.node_columns(names))
    tree_id = trie.tree_id
    max_token_id = 0
    for a, b in token_slices(trie.node_length, PART_TOKENS // SLICES if routes is None else _ROUTE_TOKENS):
        each = slice(trie.node_start[a], trie.node_start[b])
        tokens = trie.tokens[each]
        max_token_id = max(max_token_id, int(tokens.max()))
        rows = node_rows(trie, tree_id, a, b)
        table = rows.table(tokens, None if values is None else values[each])
        if routes is not None:
            columns = route_columns(routes, trie.node_start[a : b + 1])
            for field, column in zip(schema.ROUTES, columns, strict=True):
                table = table.append_column(field, column)
        nodes.write(table, tokens=len(tokens))
        trie.storage.release()
    columns = schema.trajectory_columns(trie.trajectories.column_names)
    trajectories = PartWriter(directory, "trajectories", columns)
    lengths = trie.lengths
    for a, b in token_slices(lengths, PART_TOKENS // TRAJECTORY_SLICES):
        # A page ends at the end of a chunk. One chunk makes the bytes independent of how the table was put together.
        trajectories.write(trie.trajectories.slice(a, b - a).combine_chunks(), tokens=int(lengths[a:b].sum()))
        trie.storage.release()
    entries = [*nodes.entries(), *trajectories.entries(), *write_renamed(directory, renamed)]
    return write_trie_manifest(directory, provenance, trie.share, max_token_id, entries)


def write_renamed(directory: Path, renamed: pa.Table | None) -> list[FileEntry]:
    """Write the ids that were changed to be unique, a table of `schema.RENAMED`; return the entries of its parts."""
    if renamed is None:
        return []
    writer = PartWriter(directory, "renamed", schema.RENAMED)
    writer.write(renamed.combine_chunks(), tokens=0)
    return writer.entries()


@dataclass(frozen=True, slots=True)
class NodeRows:
    """Nodes `first`, `first` + 1, ... of a forest; `offsets` int32 [num_nodes + 1] are the offsets of their tokens."""

    first: int
    tree_id: Int32
    parent: Int32
    depth: Int32
    num_passing: Int32
    offsets: Int32

    def table(self, tokens: Int32, token_values: Float64 | None = None) -> pa.Table:
        """Return a table of `schema.NODES`, and of `schema.NODE_VALUES` if there are `token_values`."""
        columns = [
            self.tree_id,
            np.arange(self.first, self.first + len(self.parent), dtype=np.int32),
            self.parent,
            self.depth,
            pa.ListArray.from_arrays(self.offsets, pa.array(tokens)),
            self.num_passing,
        ]
        table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=schema.NODES)
        if token_values is None:
            return table
        lists = pa.ListArray.from_arrays(self.offsets, pa.array(token_values))
        return table.append_column(schema.NODE_VALUES.field("token_values"), lists)


def node_rows(forest: Trie | NodeArrays, tree_id: Int32, first: int, end: int) -> NodeRows:
    """Return nodes [first, end) of a forest; `tree_id` are the trees of all nodes."""
    each = slice(first, end)
    # Offsets within these nodes: node_start[first:end + 1] = [40, 42, 47] -> [0, 2, 7].
    offsets = forest.node_start[first : end + 1] - forest.node_start[first]
    return NodeRows(
        first=first,
        tree_id=tree_id[each],
        parent=forest.parent[each],
        depth=forest.depth[each].astype(np.int32),
        num_passing=forest.num_passing[each],
        offsets=offsets.astype(np.int32),
    )


def write_trie_manifest(
    directory: Path, provenance: Provenance, share: str, max_token_id: int, files: list[FileEntry]
) -> Manifest:
    """Write the manifest of a trie whose parts are written."""
    entries = {"share": share, "max_token_id": max_token_id, "files": files}
    return write_manifest(directory, complete_manifest(schema.TRIE_FORMAT, provenance, entries))


@naming_addresses()
def read_trie(
    directory: str | AnyPath, *, memory: int | None = None, folder: Path | None = None, token_values: bool = False
) -> Trie:
    """Read a trie directory, on this machine or in an object store.

    A trie that needs more than an eighth of `memory`, in bytes, is copied into files without a name in `folder`, which
    are mapped; `trie.storage.release()` releases their pages. None takes `usual_memory`, and the folder of temporary
    files. The files need 4 bytes for each token of the trie, and the decoded columns of the trajectories. The values of
    a critic, 8 bytes for each token, are read only with `token_values`, and if there are any.

    Raises:
        TreepackError: see `read_manifest`, `check_part` and `check_nodes`; or the disk fails.
    """
    directory = local_copy(as_path(directory))
    manifest = read_manifest(directory, schema.TRIE_FORMAT)
    storage = ArrayStorage(usual_memory() if memory is None else memory, folder)
    in_file = storage.is_large(decoded_bytes(directory, manifest))
    read = read_nodes(directory, manifest, storage, in_file=in_file, token_values=token_values)
    trajectories, storage = read_trajectory_table(directory, manifest, read.storage, in_file=in_file)
    nodes = read.table
    parent = nodes["parent_id"].to_numpy()
    if not len(parent) or not len(trajectories):
        raise TreepackError(f"{directory}: has no node or no trajectory; build the trie again")
    if (parent >= np.arange(len(parent))).any():
        raise TreepackError(f"{directory}: a node comes before its parent; build the trie again")
    trie = Trie(
        tokens=read.tokens,
        node_start=np.concatenate([[0], np.cumsum(read.sizes)]),
        node_end=subtree_ends(parent),
        parent=parent,
        depth=nodes["depth"].to_numpy().astype(np.int64),
        num_passing=nodes["num_trajectories"].to_numpy(),
        end_node=trajectories["node_id"].to_numpy(),
        trajectories=trajectories,
        share=manifest["share"],
        token_values=read.token_values,
        routes=read.routes,
        storage=storage,
    )
    try:
        check_nodes(trie)
    except TreepackError as error:
        raise TreepackError(f"{directory}: {error}") from error
    return trie
