"""Copies of trie directories with a critic's value after each tree token, in the column `token_values` of the nodes.

trie/, values of all tokens --write_token_values--> out/      nodes with the column, trajectories as they are
Trie with values, a part of it --carried_values-->            the values of the part
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest, Provenance, check_part, read_manifest
from treepack.files.parts import PartWriter, read_row_groups
from treepack.files.remote.remote_output import publish
from treepack.trajectory import Float64
from treepack.trie.nodes import paths
from treepack.trie.store.trie_files import write_trie_manifest
from treepack.trie.trie import Trie


def write_token_values(source: Path, directory: Path, values: Float64, provenance: Provenance) -> Manifest:
    """Write a copy of the trie directory `source` with `values` into an existing empty `directory`, manifest last.

    The nodes are read row group by row group, and the parts of the trajectories are copied as they are. The files are
    equal to the files that `write_trie` writes of the trie with these values.

    Args:
        source: a local trie directory; earlier values in it are replaced.
        directory: the output.
        values: float64 [N_tree], the value after each token, in the order of `Trie.tokens`.
        provenance: the rest of the manifest.

    Raises:
        TreepackError: not one finite value for each token, or `source` is damaged.
    """
    manifest = read_manifest(source, schema.TRIE_FORMAT)
    if not np.isfinite(values).all():
        raise TreepackError(
            f"{source}: the value after tree token {int((~np.isfinite(values)).argmax())} is not finite; inspect the "
            "critic"
        )
    writer: PartWriter | None = None
    start = 0
    for group in read_row_groups(source, manifest, "nodes", schema.NODES, schema.NODE_OPTIONAL):
        columns = schema.node_columns({*group.column_names, *schema.NODE_VALUES.names})
        writer = writer or PartWriter(directory, "nodes", columns)
        # Lists of 2 and 3 tokens -> offsets 0 2 5, and values 0 .. 4 of this row group.
        sizes = group["tokens"].combine_chunks().value_lengths().to_numpy()
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        own = values[start : start + int(offsets[-1])]
        start += int(offsets[-1])
        if len(own) != offsets[-1]:
            break
        lists = pa.ListArray.from_arrays(offsets, pa.array(own, pa.float64()))
        arrays = [lists if name in schema.NODE_VALUES.names else group[name] for name in columns.names]
        table = pa.Table.from_arrays(arrays, schema=columns)
        # A page ends at the end of a chunk.
        writer.write(table.combine_chunks(), tokens=len(own))
    if writer is None or start != len(values):
        raise TreepackError(f"{source}: there are {len(values):,} values for another number of tree tokens")
    entries = writer.entries()
    for entry in manifest["files"]:
        if entry["name"].startswith("trajectories"):
            number = sum(each["name"].startswith("trajectories") for each in entries)
            copy = directory / f"trajectories-{number:05d}.parquet"
            shutil.copyfile(check_part(source, entry), copy)
            entries.append({**entry, "name": publish(copy, entry["sha256"])})
    return write_trie_manifest(directory, provenance, manifest["share"], manifest["max_token_id"], entries)


def carried_values(whole: Trie, part: Trie) -> Float64 | None:
    """Return the values of `whole` for the tokens of `part`, a trie of some of its trajectories in the same order.

    float64 [N_tree of `part`]; None if `whole` has no values. O(N_flat of `whole`).
    """
    if whole.token_values is None:
        return None
    values = np.zeros(part.tokens_tree)
    names = part.trajectories["trajectory_id"].to_pylist()
    own = paths(part.end_node, part.node_start, part.depth)
    num_copied = 0
    # Trajectories a b c d of the trie, b d of the part: the names match at b, then at d.
    everything = whole.trajectories["trajectory_id"].to_pylist()
    for name, place in zip(everything, paths(whole.end_node, whole.node_start, whole.depth), strict=True):
        if num_copied < len(names) and name == names[num_copied]:
            values[next(own)] = whole.token_values[place]
            num_copied += 1
    assert num_copied == len(names), "a trajectory of the part is not in the trie, or their orders differ"
    return values
