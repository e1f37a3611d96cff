"""A trie in ranges: each range of the sorted trajectories is sorted and written by a task of its own.

    tables of any trajectories --order_keys, choose_splitters--> splitters
    table --range_of_rows--> range of each row; a shuffle makes one table of each range

    range 0   a b c d        sort_range   shared [0, 4]      edges of neighbours   a b c d e | a b x share 2
              a b c d e                                      join_ranges           shared [0, 4, 2] --> nodes of all
    range 1   a b x                       shared [0]         write_range           parts of the nodes and trajectories

The order is that of `build`: partition, tokens, unique id. An order key is a byte string that compares in the same way,
so equal sequences are always in one range. The lengths of trajectories and of the prefixes that
neighbours share are enough to number the nodes; tokens stay in the tasks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treepack.cluster.sequence_table import ARRIVAL, COLUMNS, TOKENS, table_sequences
from treepack.files import schema
from treepack.files.manifest_entries import FileEntry
from treepack.files.parts import PART_TOKENS, PartWriter, planned_parts, token_slices
from treepack.sequences import list_content, take_rows
from treepack.trajectory import Int32, Int64
from treepack.trie.builders.in_memory import Partition, partitions, with_places
from treepack.trie.nodes import NodeArrays, common_prefix, forest_of, shared_with_previous, sorted_by_tokens
from treepack.trie.store.trie_files import SLICES, TRAJECTORY_SLICES, NodeRows

_SAMPLE_TOKENS = 1 << 15  # of a sequence in a sample; sequences that are equal so far are in one range
SAMPLE_REST = 256  # bytes of a sample after the bytes that it shares with others of its table
_COMPARED = 32  # trajectories of a table with which samples are compared
_STEP_OFFSET = 1 << 63


def partition_key(partition: Partition) -> bytes:
    """Return a byte string that compares with others as the partitions do; none is a prefix of a different one."""
    (has_step, step), group = partition
    # A 0 byte of the group becomes 0 255, and 0 0 ends it: "a" -> 97 0 0 comes before "a\0" -> 97 0 255 0 0.
    return bytes([has_step]) + (step + _STEP_OFFSET).to_bytes(8, "big") + _escape(group) + b"\0\0"


def _escape(group: str) -> bytes:
    return group.encode().replace(b"\0", b"\0\xff")


def order_keys(table: pa.Table, *, share: str, rows: Int64 | None = None, max_bytes: int | None = None) -> list[bytes]:
    """Return the order key of each of `rows` of a table of `sequence_table.COLUMNS`, cut to `max_bytes`.

    With share "group" it is the partition alone, so that a group is in one range.
    """
    rows = np.arange(table.num_rows) if rows is None else rows
    ranks, distinct = partitions(table.select(["step", "group_id"]).take(pa.array(rows)), share=share)
    starts = [partition_key(partition) for partition in distinct]
    if share == "group":
        return [starts[rank][:max_bytes] for rank in ranks.tolist()]
    most = _SAMPLE_TOKENS if max_bytes is None else -(-max_bytes // 4)
    sequences = table_sequences(table.select([TOKENS]))
    offsets = sequences.offsets
    keys = []
    for rank, row in zip(ranks.tolist(), rows.tolist(), strict=True):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        # Big-endian bytes compare as the numbers do: 1 -> 00 00 00 01 < 256 -> 00 00 01 00.
        tokens = sequences.tokens[begin : min(end, begin + most)].astype(">i4").tobytes()
        keys.append((starts[rank] + tokens)[:max_bytes])
    return keys


def sample_keys(table: pa.Table, *, share: str, every: int) -> list[bytes]:
    """Return the order keys of the trajectories with tokens 0, `every`, 2 * `every`, ... of a table.

    A key is cut shortly after the place where it differs from other trajectories of the table, which are some of other
    groups as a rule. So it has the system prompt that all share, and not the thousands of tokens after it.
    """
    offsets = np.concatenate([[0], np.cumsum(table["num_tokens"].to_numpy(), dtype=np.int64)])
    # Offsets [0, 4, 9, 12], every 3 -> tokens 0 3 6 9 -> trajectories 0 0 1 2.
    places = np.arange(0, int(offsets[-1]), every)
    sampled, counts = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_counts=True)
    others = np.linspace(0, table.num_rows - 1, min(table.num_rows, _COMPARED)).astype(np.int64)
    rows = np.union1d(sampled, others)
    keys = order_keys(table, share=share, rows=rows)
    ordered = sorted(keys)
    samples = []
    for at, count in zip(np.searchsorted(rows, sampled).tolist(), counts.tolist(), strict=True):
        key = keys[at]
        first, stop = bisect_left(ordered, key), bisect_right(ordered, key)
        neighbours = ordered[max(first - 1, 0) : first] + ordered[stop : stop + 1]
        common = max((_common_bytes(key, other) for other in neighbours), default=0)
        samples += [key[: common + SAMPLE_REST]] * count
    return samples


def choose_splitters(samples: Sequence[bytes], num_ranges: int) -> list[bytes]:
    """Return the first keys of all ranges but the first, so that each range has about as many of `samples`.

    There may be fewer than `num_ranges` - 1. A splitter is the shortest prefix that is larger than the sample before.
    """
    # Samples [a, ab, ac, b] and 2 ranges: number 2 is "ac", the one before is "ab", so the splitter is "ac".
    ordered = sorted(samples)
    splitters = set()
    for i in range(1, num_ranges):
        key = ordered[i * len(ordered) // num_ranges] if ordered else b""
        first = bisect_left(ordered, key)
        if first:  # the smallest key is in range 0
            splitters.add(_shortest(ordered[first - 1], key))
    return sorted(splitters)


def _shortest(smaller: bytes, key: bytes) -> bytes:
    """Return the shortest prefix of `key` that is larger than `smaller`."""
    return key[: _common_bytes(smaller, key) + 1]


def _common_bytes(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(a), len(b))  # the prefix has at least `low` and at most `high` bytes
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def range_of_rows(table: pa.Table, splitters: list[bytes], share: str) -> Int64:
    """Return the range of each row of a table of `sequence_table.COLUMNS`, int64 [num_rows]."""
    keys = order_keys(table, share=share, max_bytes=max(map(len, splitters), default=0)) if splitters else []
    # Range i begins with splitter i - 1. A key that is cut to the longest splitter compares as the whole key does.
    ranges = [bisect_right(splitters, key) for key in keys]
    return np.array(ranges, np.int64) if splitters else np.zeros(table.num_rows, np.int64)


@dataclass(frozen=True, slots=True)
class UniqueNames:
    """Unique ids of the trajectories whose ids repeat; `arrival` int64 [num_names], sorted."""

    arrival: Int64
    names: list[str]


@dataclass(frozen=True, slots=True)
class RangeEdge:
    """The first or the last trajectory of a range."""

    partition: Partition
    tokens: Int32


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """Facts about the sorted trajectories of a range, to number its nodes; no edges if the range is empty.

    `lengths` and `shared` int32 [num_trajectories] are the tokens of each, and the tokens that it shares with the one
    before; 0 for the first. `groups` are the requested groups that are in the range.
    """

    lengths: Int32
    shared: Int32
    first: RangeEdge | None
    last: RangeEdge | None
    groups: frozenset[str]


def sort_range(
    table: pa.Table, *, share: str, names: UniqueNames | None = None, groups: frozenset[str] = frozenset()
) -> tuple[pa.Table, RangeSummary]:
    """Sort the trajectories of a range by partition, tokens and unique id.

    Args:
        table: trajectories as `sequence_table.COLUMNS`, in any order.
        share: "all", "group" or "none".
        names: the ids that differ from the ids in `table`.
        groups: group ids to look for.

    Returns:
        The sorted table without `arrival`, whose `tokens` a trajectory does not share with the one before, and its
        summary.
    """
    table = _rename(table.select(COLUMNS.names).cast(COLUMNS), names)
    if not table.num_rows:
        nothing = np.zeros(0, np.int32)
        return table.drop_columns([ARRIVAL]), RangeSummary(nothing, nothing, None, None, frozenset())
    sequences = table_sequences(table)
    tokens, offsets = sequences.tokens, sequences.offsets
    ranks, distinct = partitions(table, share=share)
    by_name = pc.sort_indices(table["trajectory_id"]).to_pylist()
    order = sorted_by_tokens(tokens, offsets, ranks, by_name)
    unshared = np.arange(len(ranks)) if share == "none" else ranks
    shared = np.array(shared_with_previous(tokens, offsets, unshared, order), np.int32)
    begins, ends = offsets[:-1][order] + shared, offsets[1:][order]
    new = [tokens[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    # Lengths [4, 5, 3], shared [0, 4, 2] -> new tokens 4, 1, 1 -> offsets 0 4 5 6.
    stored = pa.LargeListArray.from_arrays(
        np.concatenate([[0], np.cumsum(ends - begins)]), pa.array(np.concatenate(new), pa.int32())
    )
    result = take_rows(sequences.table.drop_columns([ARRIVAL]), np.array(order)).append_column(TOKENS, stored)

    def edge(i: int) -> RangeEdge:
        return RangeEdge(distinct[ranks[i]], tokens[offsets[i] : offsets[i + 1]].copy())

    own = groups.intersection(table["group_id"].unique().to_pylist()) if groups else groups
    lengths = np.diff(offsets)[order].astype(np.int32)
    return result, RangeSummary(lengths, shared, edge(order[0]), edge(order[-1]), own)


def _rename(table: pa.Table, names: UniqueNames | None) -> pa.Table:
    if names is None or not len(names.arrival):
        return table
    arrival = table[ARRIVAL].to_numpy()
    # Arrival [8, 3, 5], names for [3, 8] -> places [1, 0, 1], of which the first two are equal.
    at = np.minimum(np.searchsorted(names.arrival, arrival), len(names.arrival) - 1)
    is_new = names.arrival[at] == arrival
    column = table.schema.get_field_index("trajectory_id")
    new = pa.array([names.names[i] for i in at[is_new].tolist()], pa.string())
    ids = pc.replace_with_mask(table["trajectory_id"].combine_chunks(), pa.array(is_new), new)
    return table.set_column(column, table.schema.field(column), ids)


@dataclass(frozen=True, slots=True)
class RangeNodes:
    """The nodes of a range with their numbers in the whole trie, from number `first` on.

    `tree_id`, `parent`, `depth`, `num_passing` and `sizes` have one value for each node, `end_node` and `end_tree` for
    each trajectory. The first trajectory shares `shared` tokens with the last one of an earlier range.
    """

    first: int
    tree_id: Int32
    parent: Int32
    depth: Int32
    num_passing: Int32
    sizes: Int64
    end_node: Int32
    end_tree: Int32
    lengths: Int64
    shared: int

    @property
    def num_parts(self) -> tuple[int, int]:
        """Parts of the nodes and of the trajectories that `write_range` writes."""
        nodes = planned_parts(self.sizes, PART_TOKENS // SLICES)
        return len(nodes), len(planned_parts(self.lengths, PART_TOKENS // TRAJECTORY_SLICES))


def join_ranges(summaries: Sequence[RangeSummary], *, share: str) -> NodeArrays:
    """Return the nodes of the trie of all ranges, which have at least one trajectory together."""
    shared = np.concatenate([each.shared for each in summaries]).astype(np.int64)
    lengths = np.concatenate([each.lengths for each in summaries]).astype(np.int64)
    for start, tokens in _shared_at_edges(summaries, share=share):
        shared[start] = tokens
    return forest_of(array("q", shared.tobytes()), array("q", lengths.tobytes()))


def _shared_at_edges(summaries: Sequence[RangeSummary], *, share: str) -> Iterator[tuple[int, int]]:
    """Yield for each range the number of its first trajectory and the tokens that this shares with the one before."""
    last: RangeEdge | None = None
    start = 0
    for each in summaries:
        if each.first is not None:
            is_same = share != "none" and last is not None and last.partition == each.first.partition
            yield start, common_prefix(last.tokens, each.first.tokens) if is_same and last is not None else 0
            last = each.last
        start += len(each.lengths)


def nodes_of_ranges(nodes: NodeArrays, summaries: Sequence[RangeSummary], *, share: str) -> Iterator[RangeNodes]:
    """Yield the nodes of each range; a node is in the range of the first trajectory that passes through it."""
    tree_id = nodes.tree_id
    at_edges = dict(_shared_at_edges(summaries, share=share))
    trajectory = node = token = 0
    for each in summaries:
        shared = at_edges.get(trajectory, 0) if len(each.lengths) else 0
        token += int((each.lengths - each.shared).sum(dtype=np.int64)) - shared
        # New tokens of a trajectory begin a node, so the nodes of a range end where its new tokens end.
        end = int(np.searchsorted(nodes.node_start, token))
        own, ends = slice(node, end), nodes.end_node[trajectory : trajectory + len(each.lengths)]
        yield RangeNodes(
            first=node,
            tree_id=tree_id[own],
            parent=nodes.parent[own],
            depth=nodes.depth[own].astype(np.int32),
            num_passing=nodes.num_passing[own],
            sizes=np.diff(nodes.node_start[node : end + 1]),
            end_node=ends,
            end_tree=tree_id[ends],
            lengths=each.lengths.astype(np.int64),
            shared=shared,
        )
        trajectory, node = trajectory + len(each.lengths), end


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """The manifest's entries of the parts of a range, and its largest token id."""

    nodes: list[FileEntry]
    trajectories: list[FileEntry]
    max_token_id: int


def write_range(
    table: pa.Table, nodes: RangeNodes, folder: Path, *, numbers: tuple[int, int], columns: pa.Schema
) -> WrittenRange:
    """Write the parts of a range into `folder`, from the given part numbers of nodes and trajectories on.

    `table` comes from `sort_range`, and `columns` are the columns of the trajectories of the whole trie.
    """
    tokens = list_content(table[TOKENS])[0][nodes.shared :]
    starts = np.concatenate([[0], np.cumsum(nodes.sizes)])
    writer = PartWriter(folder, "nodes", schema.NODES, first=numbers[0])
    for a, b in token_slices(nodes.sizes, PART_TOKENS // SLICES):
        own = tokens[starts[a] : starts[b]]
        writer.write(_node_rows(nodes, starts, a, b).table(own), tokens=len(own))
    entries = writer.entries()
    rows = with_places(
        table.drop_columns([TOKENS, *(name for name in schema.RECORDED.names if name not in columns.names)]),
        nodes.end_tree,
        nodes.end_node,
    )
    writer = PartWriter(folder, "trajectories", columns, first=numbers[1])
    for a, b in token_slices(nodes.lengths, PART_TOKENS // TRAJECTORY_SLICES):
        # A page ends where a chunk ends.
        size = int(nodes.lengths[a:b].sum())
        writer.write(rows.slice(a, b - a).combine_chunks(), tokens=size)
    return WrittenRange(entries, writer.entries(), int(tokens.max(initial=0)))


def _node_rows(nodes: RangeNodes, starts: Int64, a: int, b: int) -> NodeRows:
    """Return nodes `a` .. `b` - 1 of a range, whose tokens start at `starts`."""
    return NodeRows(
        first=nodes.first + a,
        tree_id=nodes.tree_id[a:b],
        parent=nodes.parent[a:b],
        depth=nodes.depth[a:b],
        num_passing=nodes.num_passing[a:b],
        offsets=(starts[a : b + 1] - starts[a]).astype(np.int32),
    )
