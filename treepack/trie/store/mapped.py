"""Read a trie directory that is larger than the memory: row group by row group into files, which are then mapped.

    nodes-*         tokens                --append--> file of int32        mapped as `Trie.tokens`
                    token_values          --append--> file of float64      mapped as `Trie.token_values`
                    routes                --append--> file of bytes        mapped as `Trie.routes`
                    other columns         per node, in memory
    trajectories-*  all columns           --write_table--> Arrow stream    mapped as `Trie.trajectories`

Memory: the largest row group, decoded, and 40 bytes for each node.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest
from treepack.files.parts import read_row_groups
from treepack.files.routes import route_array, route_content
from treepack.sequences import list_content
from treepack.trajectory import Float64, Int32, Int64, Routes
from treepack.trie.shape import check_trained
from treepack.trie.storage import ArrayStorage, disk, map_file
from treepack.trie.store.table_stream import write_table

# Bytes of a text in an Arrow column beyond the bytes in the file: repeated texts are stored once there.
_TEXT_BYTES = 64
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}


def decoded_bytes(directory: Path, manifest: Manifest) -> int:
    """Return about how many bytes all columns of a trie directory need in memory; 0 if its parts are damaged.

    Only the footers are read. The tokens of the nodes, for example, need 4 bytes for each value of their column.
    """
    try:
        parts = [pq.read_metadata(directory / entry["name"]) for entry in manifest["files"]]
    except (pa.ArrowException, OSError):
        return 0  # reading the part names the fault
    columns = (
        part.row_group(group).column(i)
        for part in parts
        for group in range(part.num_row_groups)
        for i in range(part.num_columns)
    )
    return sum(
        column.num_values * _WIDTHS.get(column.physical_type, _TEXT_BYTES)
        + (0 if column.physical_type in _WIDTHS else column.total_uncompressed_size)
        for column in columns
    )


@dataclass(frozen=True, slots=True)
class _ReadNodes:
    """The nodes of a trie directory.

    Attributes:
        table: the columns of `schema.NODES` except the tokens.
        sizes: tokens of each node, int64 [num_nodes].
        tokens: tokens of all nodes, int32 [N_tree].
        token_values: values after these tokens, float64 [N_tree]; None if they were not read, or there are none.
        routes: experts of these tokens, [N_tree, layers, k], or None.
        storage: with the maps of the three.
    """

    table: pa.Table
    sizes: Int64
    tokens: Int32
    token_values: Float64 | None
    routes: Routes | None
    storage: ArrayStorage


def read_nodes(
    directory: Path, manifest: Manifest, storage: ArrayStorage, *, in_file: bool, token_values: bool = False
) -> _ReadNodes:
    """Read the nodes of a trie directory, and their tokens into memory or into a file; values only if `token_values`.

    Raises:
        TreepackError: see `read_row_groups`; a node with more or fewer values than tokens; or the disk fails.
    """
    tokens = storage.growing_array(np.int32, in_file=in_file)
    values = storage.growing_array(np.float64, in_file=in_file)
    routes, shapes = storage.growing_array(np.uint8, in_file=in_file), set()
    others, sizes, known = [], [], False
    for group in read_row_groups(directory, manifest, "nodes", schema.NODES, schema.NODE_OPTIONAL):
        own, lengths = list_content(group["tokens"])
        tokens.append(own)
        sizes.append(lengths)
        if token_values and "token_values" in group.column_names:
            known = True
            column = group["token_values"]
            if any(chunk.flatten().null_count for chunk in column.chunks):
                raise TreepackError(f"{directory}: a node has null among its token_values; write them again")
            own, counts = list_content(column)
            if (counts != lengths).any():
                node = group["node_id"][int((counts != lengths).argmax())]
                raise TreepackError(f"{directory}: node {node} has not one of token_values per token; write it again")
            values.append(own)
        if "routes" in group.column_names:
            data, shape = route_content(group, str(directory))
            routes.append(data)
            shapes.add(shape)
        others.append(group.select([name for name in schema.NODES.names if name != "tokens"]))
    all_tokens, with_tokens = tokens.finish()
    all_values, with_values = values.finish()
    all_routes, with_routes = routes.finish()
    # All have the earlier maps: (a b) of the tokens, (a c) of the values, (a d) of the routes -> a b c d.
    maps = (*with_tokens.maps, *(each for s in (with_values, with_routes) for each in s.maps[len(storage.maps) :]))
    if len(shapes) > 1:
        raise TreepackError(f"{directory}: its nodes have routes of several shapes, {sorted(shapes)}; write it again")
    return _ReadNodes(
        pa.concat_tables(others),
        np.concatenate(sizes),
        all_tokens,
        all_values if known else None,
        route_array(all_routes, (len(all_tokens), *shapes.pop()), str(directory)) if shapes else None,
        replace(storage, maps=maps),
    )


def read_trajectory_table(
    directory: Path, manifest: Manifest, storage: ArrayStorage, *, in_file: bool
) -> tuple[pa.Table, ArrayStorage]:
    """Read the trajectories of a trie directory into memory or into a file; return the storage with their map too.

    Raises:
        TreepackError: see `read_row_groups` and `check_trained`; or the disk fails.
    """
    columns = schema.TRAJECTORIES, schema.OPTIONAL
    groups = read_row_groups(directory, manifest, "trajectories", *columns, whole=not in_file)
    checked = (_checked(directory, group) for group in groups)
    return stored_table(checked, storage) if in_file else (pa.concat_tables([*checked]), storage)


def _checked(directory: Path, group: pa.Table) -> pa.Table:
    try:
        check_trained(group, group["num_tokens"].to_numpy())
    except TreepackError as error:
        raise TreepackError(f"{directory}: {error}") from error
    return group


def stored_table(pieces: Iterable[pa.Table], storage: ArrayStorage) -> tuple[pa.Table, ArrayStorage]:
    """Write the `pieces` of a table, at least one, into a file; return the mapped table, and the storage with its map.

    Raises:
        TreepackError: the disk fails.
    """
    with disk(storage.folder), tempfile.TemporaryFile(dir=storage.folder) as file:
        write_table(file, pieces)
        mapped = map_file(file)
    assert mapped is not None  # a stream contains at least its schema
    table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all()
    return table, replace(storage, maps=(*storage.maps, mapped))
