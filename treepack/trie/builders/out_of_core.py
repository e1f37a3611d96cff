"""Build tries of more trajectories than fit into memory: sorted runs on disk, merged into the same trie.

    batches --up to the memory, sorted--> run on disk             run, run, ... --merge--> forest
                                                                                  tokens, table   on disk, mapped

    run 0   a b c d          run 1   a b x           merged   a b c d       from run 0, shared 0
            . . . . e                c                        . . . . e     from run 0, shared 4
                                                              . . x         from run 1, shared 2
                                                              c             from run 1, shared 0

A run stores each sequence without the tokens that it shares with the one before, so it is as large as its trie. Input
that fits into one run is built in memory and never written to disk.

Memory: about four times the size of a run, 150 bytes for each trajectory, the longest trajectory once for each run, the
trajectories of 2^23 tokens, and all trajectories with the same tokens. The spool files have no name, so nothing is left
of them when the process ends, even if it is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files.parts import token_slices
from treepack.sequences import NO_TRAJECTORY, Sequences, as_columns, join, with_unique_ids
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie, with_places
from treepack.trie.builders.merged import MergedRuns, merge_runs, read_merged_rows, read_merged_tokens
from treepack.trie.builders.spool import RunStore, SpoolFiles, spool_disk
from treepack.trie.storage import ArrayStorage
from treepack.trie.store.mapped import stored_table
from treepack.trie.trie import Trie, trie_of_nodes

# Maximum size of a run: sorting needs about four times as much, so 0.5 GB; 10 GB of input make some 100 runs.
RUN_BYTES = 1 << 27
# Trajectories are put into final order for so many tokens at a time: some 100 MB of columns.
TABLE_TOKENS = 1 << 23
_COPY_TOKENS = 1 << 18  # tokens that are put into final order at a time


def run_size(memory: int | None) -> int:
    """Return the size of runs, in bytes, whose sorting takes at most half of `memory`; None sets no limit."""
    return RUN_BYTES if memory is None else min(RUN_BYTES, max(1, memory // 8))


def build_large_trie(
    batches: Iterable[Sequences],
    *,
    share: str = "all",
    folder: Path | None = None,
    memory: int | None = None,
    run_bytes: int | None = None,
) -> Trie:
    """Build the trie that `build_trie` builds from all `batches`, in bounded memory; trajectory ids may repeat.

    Input larger than `run_bytes`, None for the `run_size` of `memory`, is spooled to `folder`, by default the folder of
    temporary files. It needs twice 4 bytes for each token of the tries, and twice the trajectories' columns. The trie
    is then mapped; `Trie.storage` releases its pages.

    Raises:
        TreepackError: no trajectory, or the disk fails.
    """
    storage = ArrayStorage(memory, folder)
    with SpoolFiles(folder) as spool:
        store = RunStore(spool, share=share, run_bytes=run_size(memory) if run_bytes is None else run_bytes)
        for number, batch in enumerate(batches):
            store.add(batch, number)
        if not store.runs:
            return replace(build_trie(sequences_in_memory(store.pending), share=share), storage=storage)
        with spool_disk(folder):
            return mapped_trie(merge_runs([spool], store.finish(), share=share), storage)


def rebuild(trie: Trie, trajectories: Iterable[Trajectory]) -> Trie:
    """Build the trie of `trajectories`, which are some trajectories of `trie`, cut or whole; mapped if `trie` is large.

    Raises:
        TreepackError: no trajectory, or the disk fails.
    """
    storage = trie.storage
    if not storage.is_large(4 * trie.tokens_flat):
        return replace(build_trie(trajectories, share=trie.share), storage=replace(storage, maps=()))
    return build_large_trie(_batches(trajectories), share=trie.share, folder=storage.folder, memory=storage.memory)


def _batches(trajectories: Iterable[Trajectory]) -> Iterator[Sequences]:
    """Yield the columns of `trajectories`, of `_COPY_TOKENS` tokens or more at a time."""
    batch: list[Trajectory] = []
    num_tokens = 0
    for trajectory in trajectories:
        assert isinstance(trajectory.content, Tokens)
        batch.append(trajectory)
        num_tokens += len(trajectory.content.tokens)
        if num_tokens >= _COPY_TOKENS:
            yield as_columns(batch)
            batch, num_tokens = [], 0
    if batch:
        yield as_columns(batch)


def sequences_in_memory(batches: list[Sequences]) -> Sequences:
    """Return the trajectories of `batches` with unique ids, and empty the list.

    Raises:
        TreepackError: no trajectory.
    """
    if not batches:
        raise TreepackError(NO_TRAJECTORY)
    sequences = join(batches)
    batches.clear()  # frees the batches before the trie is built
    return with_unique_ids(sequences)


def mapped_trie(merged: MergedRuns, storage: ArrayStorage) -> Trie:
    """Copy tokens and trajectories of a trie on disk into two files in final order, and map them.

    Raises:
        TreepackError: the disk fails.
    """
    growing = storage.growing_array(np.int32, in_file=True)
    size = int(merged.begins[-1])
    for begin in range(0, size, _COPY_TOKENS):
        growing.append(read_merged_tokens(merged.spools, merged.token_places(begin, min(begin + _COPY_TOKENS, size))))
    tokens, storage = growing.finish()
    table, storage = stored_table(_tables(merged), storage)
    return replace(trie_of_nodes(merged.nodes, tokens, table, share=merged.share), storage=storage)


def _tables(merged: MergedRuns) -> Iterator[pa.Table]:
    tree_id = merged.nodes.tree_id
    for begin, end in token_slices(merged.lengths, TABLE_TOKENS):
        node_id = merged.nodes.end_node[begin:end]
        yield with_places(read_merged_rows(merged.spools, merged.row_places(begin, end)), tree_id[node_id], node_id)
