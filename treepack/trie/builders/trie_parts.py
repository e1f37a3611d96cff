"""Write the trie of sorted runs: whole parts, each of them by any process that has the spools.

    MergedRuns --part_tasks--> NodesPart, ..., TrajectoriesPart, ... --write_part--> entry of the manifest

Parts end as if one process wrote all of them, so the bytes are equal to the bytes of `store.trie_files.write_trie`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from treepack.files import schema
from treepack.files.manifest_entries import FileEntry
from treepack.files.parts import PART_TOKENS, PartWriter, planned_parts
from treepack.trajectory import Int32
from treepack.trie.builders.in_memory import with_places
from treepack.trie.builders.merged import MergedRuns, RowPlaces, TokenPlaces, read_merged_rows, read_merged_tokens
from treepack.trie.builders.spool import SpoolFiles
from treepack.trie.store.trie_files import SLICES, TRAJECTORY_SLICES, NodeRows, node_rows


@dataclass(frozen=True, slots=True)
class NodesPart:
    """Part `number` of the nodes: slices of nodes, and where their tokens are."""

    directory: Path
    number: int
    slices: list[tuple[NodeRows, TokenPlaces]]


@dataclass(frozen=True, slots=True)
class TrajectoriesPart:
    """Part `number` of the trajectories: slices of trajectories, and their trees and nodes."""

    directory: Path
    number: int
    slices: list[tuple[RowPlaces, Int32, Int32]]


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The entry of a part, and the largest token id in it."""

    entry: FileEntry
    max_token_id: int = 0


def part_tasks(merged: MergedRuns, directory: Path) -> Iterator[NodesPart | TrajectoriesPart]:
    """Yield all parts of the trie, in the order of the manifest."""
    nodes, tree_id = merged.nodes, merged.nodes.tree_id
    start = nodes.node_start
    for number, slices in enumerate(planned_parts(start[1:] - start[:-1], PART_TOKENS // SLICES)):
        yield NodesPart(
            directory,
            number,
            [(node_rows(nodes, tree_id, a, b), merged.token_places(int(start[a]), int(start[b]))) for a, b in slices],
        )
    end = nodes.end_node
    for number, slices in enumerate(planned_parts(merged.lengths, PART_TOKENS // TRAJECTORY_SLICES)):
        yield TrajectoriesPart(
            directory, number, [(merged.row_places(a, b), tree_id[end[a:b]], end[a:b]) for a, b in slices]
        )


def write_part(spools: Sequence[SpoolFiles], part: NodesPart | TrajectoriesPart) -> WrittenPart:
    """Write a part from the runs in `spools`."""
    # 0 tokens: the part is whole, whatever its size.
    max_token_id = 0
    if isinstance(part, NodesPart):
        writer = PartWriter(part.directory, "nodes", schema.NODES, first=part.number)
        for rows, places in part.slices:
            tokens = read_merged_tokens(spools, places)
            max_token_id = max(max_token_id, int(tokens.max()))
            writer.write(rows.table(tokens), tokens=0)
    else:
        writer = PartWriter(part.directory, "trajectories", part.slices[0][0].columns, first=part.number)
        for row_places, tree_id, node_id in part.slices:
            table = with_places(read_merged_rows(spools, row_places), tree_id, node_id)
            # A page ends at the end of a chunk.
            writer.write(table.combine_chunks(), tokens=0)
    (entry,) = writer.entries()
    return WrittenPart(entry, max_token_id)
