"""Build tries of more trajectories than fit into memory: sorted runs on disk, merged into the same trie.

    batches --as many as fit memory, sorted--> run on disk        run, run, ... --merge--> forest
                                                                                  tokens, table   on disk, mapped

    run 0   a b c d          run 1   a b x           merged   a b c d       from run 0, shared 0
            . . . . e                c                        . . . . e     from run 0, shared 4
                                                              . . x         from run 1, shared 2
                                                              c             from run 1, shared 0

A run stores each sequence without the tokens that it shares with the one before, so it is as large as its trie. Input
that fits into one run is built in memory and never written to disk.

Memory: about four times `RUN_BYTES`, 150 bytes for each trajectory, the longest trajectory once for each run, the
trajectories of 2^23 tokens, and all trajectories with the same tokens. The spool files have no name, so nothing is left
of them when the process ends, even if it is killed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.columns import NO_TRAJECTORY, Sequences, join, with_unique_ids
from treepack.errors import TreepackError
from treepack.files.parts import token_slices
from treepack.trie.build import build_trie, with_places
from treepack.trie.merged import MergedRuns, merge_runs, read_rows, read_tokens
from treepack.trie.spool import RunStore, Spool, disk, read_table, write_table
from treepack.trie.trie import Trie

# Size of a run: sorting needs about four times as much, so 0.5 GB; 10 GB of input make some 100 runs.
RUN_BYTES = 1 << 27
# Trajectories are put into final order for so many tokens at a time: some 100 MB of columns.
TABLE_TOKENS = 1 << 23
COPY_TOKENS = 1 << 18  # tokens that are put into final order at a time


@dataclass(frozen=True, slots=True)
class Built:
    """A trie whose tokens and trajectories may be memory-mapped files."""

    trie: Trie
    maps: tuple[mmap.mmap, ...] = ()

    def release(self) -> None:
        """Release the file pages in memory; they are read again when they are needed."""
        for mapped in self.maps:
            mapped.madvise(mmap.MADV_DONTNEED)


def build_large_trie(
    batches: Iterable[Sequences], *, share: str = "all", folder: Path | None = None, run_bytes: int = RUN_BYTES
) -> Built:
    """Build the trie that `build_trie` builds from all `batches`, in bounded memory; trajectory ids may repeat.

    Input larger than `run_bytes` is spooled to `folder`, by default the folder of temporary files. It needs twice 4
    bytes for each token of the tries, and twice the trajectories' columns.

    Raises:
        TreepackError: no trajectory, or the disk fails.
    """
    with Spool(folder) as spool:
        store = RunStore(spool, share=share, run_bytes=run_bytes)
        for number, batch in enumerate(batches):
            store.add(batch, number)
        if not store.runs:
            return Built(trie_in_memory(store.pending, share=share))
        with disk(folder):
            return mapped_trie(merge_runs([spool], store.finish(), share=share), folder)


def trie_in_memory(batches: list[Sequences], *, share: str) -> Trie:
    """Build the trie of `batches`, and empty the list.

    Raises:
        TreepackError: no trajectory.
    """
    if not batches:
        raise TreepackError(NO_TRAJECTORY)
    sequences = join(batches)
    batches.clear()  # frees the batches before the trie is built
    return build_trie(replace(sequences, table=with_unique_ids(sequences.table)), share=share)


def mapped_trie(merged: MergedRuns, folder: Path | None) -> Built:
    """Copy tokens and trajectories of a trie on disk into two files in final order, and map them."""
    with Spool(folder) as own, disk(folder):
        size = int(merged.begins[-1])
        for begin in range(0, size, COPY_TOKENS):
            places = merged.token_places(begin, min(begin + COPY_TOKENS, size))
            own.tokens.file.write(read_tokens(merged.spools, places).data)
        write_table(own.tables.file, _tables(merged))
        own.tokens.file.flush()
        own.tables.file.flush()
        mapped = own.tokens.map(), own.tables.map()
        table = read_table(own, 0, len(mapped[1]))
        return Built(merged.nodes.trie(np.frombuffer(mapped[0], np.int32), table, share=merged.share), mapped)


def _tables(merged: MergedRuns) -> Iterator[pa.Table]:
    tree_id = merged.nodes.tree_id
    for begin, end in token_slices(merged.lengths, TABLE_TOKENS):
        node_id = merged.nodes.end_node[begin:end]
        yield with_places(read_rows(merged.spools, merged.row_places(begin, end)), tree_id[node_id], node_id)
