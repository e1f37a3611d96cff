"""Where the segments of a group's rollouts start: as recorded, at turns, where they branch, or every N tokens.

    Trie, group of each trajectory, segment --find_cuts--> Cuts(owner, start)

        1 2 3 | 4 5 6 | 7 8       d  trained: 4 5 and 7 8, so cut at 3 and 6
        1 2 3   4 5 6 | 9         i  trained: 9 alone, a continuation of d that came back with its prompt
        1 2 3 | 4 5 6 | 9            d's cut at 3 is i's too: both share the segment 4 5 6

A rollout that starts inside another one comes back as a prompt, which trains nothing, and a response. The turns of its
prompt are those of the rollout that it continues (`group_tree.continued`): of that one's cuts, those it took over
itself included, it has the ones that lie within the tokens that they share. Its own begin with its first trained token,
so cuts of rollouts that start at the prompt stay as they are, whatever continuations join them. N tokens are counted
from the first token on the path of a trajectory that any of its group trains there.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.columns import SpanView
from treepack.errors import TreepackError
from treepack.ingest.readers.fields import METADATA_DICTS
from treepack.rl.group_tree import Continued, NodePaths, continued, group_tree
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

SEGMENTS = ("auto", "recorded", "turn", "node")
MAX_SIZE = 2**31 - 1


class Cuts(NamedTuple):
    """The token `start` of every segment and its `owner`, an index into the members; int64, in any order, distinct.

    `segment` is how they were cut: what was asked for, and what "auto" found. A member may have none.
    """

    segment: str
    owner: Int64
    start: Int64


def find_cuts(trie: Trie, paths: NodePaths, members: Int64, group: Int64, *, segment: str) -> Cuts:
    """Where segments of the trajectories `members` of `trie` (ascending) start; `group` are codes from 0.

    `segment` as in `segments.segment_tree`; `paths` are the trie's.

    Raises:
        TreepackError: an unknown `segment`, or no or faulty recorded offsets.
    """
    if segment.isdecimal() and 0 < int(segment) <= MAX_SIZE:
        return Cuts(segment, *_every(trie, paths, members, group, size=int(segment)))
    if segment not in SEGMENTS:
        raise TreepackError(f"segment is {segment!r}; expected {', '.join(SEGMENTS)} or a number of tokens")
    if segment == "turn":
        return Cuts(segment, *_turns(trie, paths, members, group))
    recorded = None if segment == "node" else _recorded(trie, members)
    if recorded is not None:
        return Cuts("recorded", *recorded)
    if segment == "recorded":
        raise TreepackError("no trajectory has 'segments' in its metadata; record them or give another --segment")
    return Cuts("node", *_branchings(trie, paths, members, group))


def _first_trained(trie: Trie, members: Int64) -> Int64:
    """First trained token of each trajectory, its length if it has none."""
    spans = SpanView.of(trie.trajectories)
    found = trie.lengths.copy()
    some = np.flatnonzero(np.diff(spans.offsets))
    found[some] = spans.starts[spans.offsets[some]]
    return found[members]


def _continued(
    trie: Trie, paths: NodePaths, members: Int64, group: Int64, *, first: Int64, cuts: tuple[Int64, Int64]
) -> Continued:
    """`group_tree.continued`, where of equally good ones that is preferred whose own cuts differ by an earlier one."""
    if (first == first[np.unique(group, return_index=True)[1]][group]).all():  # all start with their group
        return Continued(np.full(len(members), -1), np.zeros(len(members), np.int64))
    owner, start = cuts
    begin = (4 * np.searchsorted(owner, np.arange(len(members) + 1))).tolist()
    packed, end = start.astype(">u4").tobytes(), b"\xff" * 4
    lists = [packed[a:b] + end for a, b in itertools.pairwise(begin)]
    ranks = {known: rank for rank, known in enumerate(sorted(set(lists)))}
    return continued(group_tree(trie, paths, members, group), first, np.array([ranks[one] for one in lists]))


def _every(trie: Trie, paths: NodePaths, members: Int64, group: Int64, *, size: int) -> tuple[Int64, Int64]:
    first = _first_trained(trie, members)
    own = np.arange(len(members)), first
    by = _continued(trie, paths, members, group, first=first, cuts=own).by
    begun = np.where(by < 0, np.arange(len(members)), by)
    while not np.array_equal(begun, further := begun[begun]):
        begun = further
    origin = first[begun]
    counts = -((origin - trie.lengths[members]) // size)
    owner = np.repeat(np.arange(len(members)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, origin[owner] + number * size


def _turns(trie: Trie, paths: NodePaths, members: Int64, group: Int64) -> tuple[Int64, Int64]:
    owner, start = own = _trained_runs(trie, members)
    found = _continued(trie, paths, members, group, first=_first_trained(trie, members), cuts=own)
    taken, at = _taken_over(owner, start, found)
    return np.concatenate([owner, taken]), np.concatenate([start, at])


def _trained_runs(trie: Trie, members: Int64) -> tuple[Int64, Int64]:
    """Owner and first token of each run of trained tokens, ascending."""
    spans = SpanView.of(trie.trajectories)
    of_span = np.repeat(np.arange(trie.num_trajectories), np.diff(spans.offsets))
    opens = np.ones(len(of_span), bool)
    opens[1:] = (of_span[1:] != of_span[:-1]) | (spans.starts[1:] != spans.ends[:-1])
    index = np.full(trie.num_trajectories, -1)
    index[members] = np.arange(len(members))
    opens &= index[of_span] >= 0
    return index[of_span[opens]], spans.starts[opens].astype(np.int64)


def _taken_over(owner: Int64, start: Int64, found: Continued) -> tuple[Int64, Int64]:
    """The cuts that each trajectory has from the one it continues, whose own are `start`, ascending by `owner`.

    In rounds: one is served once the one it continues has been, so continuations of continuations have theirs too.
    """
    count = len(found.by)
    own = np.searchsorted(owner, np.arange(count + 1))
    pool, begin, size = np.zeros(0, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    owners = [np.zeros(0, np.int64)]
    served, waiting = found.by < 0, np.flatnonzero(found.by >= 0)
    while len(waiting):
        ready = served[found.by[waiting]]
        mine, waiting = waiting[ready], waiting[~ready]
        by = found.by[mine]
        taken, at = _lists([(start, own[by], own[by + 1]), (pool, begin[by], begin[by] + size[by])])
        kept = at < found.shared[mine][taken]
        taken, at = taken[kept], at[kept]
        size[mine] = np.bincount(taken, minlength=len(mine))
        begin[mine] = len(pool) + np.cumsum(size[mine]) - size[mine]
        pool = np.concatenate([pool, at[np.argsort(taken, kind="stable")]])
        owners.append(np.repeat(mine, size[mine]))
        served[mine] = True
    return np.concatenate(owners), pool


def _lists(parts: list[tuple[Int64, Int64, Int64]]) -> tuple[Int64, Int64]:
    """The values [start[i], stop[i]) of each of several arrays, and the i of each value."""
    owners, values = [], []
    for array, start, stop in parts:
        size = stop - start
        owners.append(np.repeat(np.arange(len(start)), size))
        values.append(array[np.arange(size.sum()) + np.repeat(start - np.cumsum(size) + size, size)])
    return np.concatenate(owners), np.concatenate(values)


def _recorded(trie: Trie, members: Int64) -> tuple[Int64, Int64] | None:
    """The offsets in the metadata of all trajectories, or None if none has any."""
    table: pa.Table = trie.trajectories.take(pa.array(members))
    named = pc.match_substring(table["metadata"], '"segments"').to_numpy()
    if not named.any():
        return None
    rows = table.select(["metadata", "source"]).to_pylist()
    found = [_offsets(row["metadata"]) for row in rows]
    if all(offsets is None for offsets in found):  # the word stands somewhere else in the metadata
        return None
    for row, offsets, length in zip(rows, found, trie.lengths[members].tolist(), strict=True):
        if fault := _fault(offsets, length):
            raise TreepackError(
                f"{row['source']}: {fault}; expected the ascending token offsets of its segments, or --segment node"
            )
    starts = np.array([offset for offsets in found for offset in offsets], np.int64)
    return np.repeat(np.arange(len(members)), [len(offsets) for offsets in found]), starts


def _offsets(metadata: str) -> Any:
    fields = orjson.loads(metadata)
    nested = [fields[name] for name in sorted(METADATA_DICTS) if isinstance(fields.get(name), dict)]
    return next((held["segments"] for held in (fields, *nested) if "segments" in held), None)


def _fault(offsets: Any, length: int) -> str | None:
    if offsets is None:
        return "its metadata has no 'segments' and that of other trajectories has"
    if not isinstance(offsets, list) or not offsets or any(type(offset) is not int for offset in offsets):
        return "'segments' is no list of integers"
    if any(a >= b for a, b in itertools.pairwise(offsets)):
        return "'segments' does not ascend"
    if not 0 < offsets[0] <= offsets[-1] < length:
        return f"'segments' leaves 1 .. {length - 1}, the tokens after the first"
    return None


def _branchings(trie: Trie, paths: NodePaths, members: Int64, group: Int64) -> tuple[Int64, Int64]:
    """Cuts where two or more trajectories of a group go on differently in the trie.

    Of the nodes of the group's own tree the ones with several children branch; the others are where a trajectory ends
    inside another.
    """
    tree = group_tree(trie, paths, members, group)
    up = tree.up.copy()
    branches = np.bincount(up[up >= 0], minlength=len(up)) > 1
    while (idle := (up >= 0) & ~branches[up]).any():
        up[idle] = up[up[idle]]

    found_owner, found_start = [], []
    at, owner = up[tree.end], np.arange(len(members))
    while (inside := at >= 0).any():
        at, owner = at[inside], owner[inside]
        found_owner.append(owner)
        found_start.append(tree.paths.path_length[at])
        at = up[at]
    # Where first tokens differ nothing is in common, so the root is empty.
    apart = np.flatnonzero(_in_several_trees(trie.tree_id[trie.end_node[members]].astype(np.int64), group)[group])
    return np.concatenate([apart, *found_owner]), np.concatenate([np.zeros_like(apart), *found_start])


def _in_several_trees(tree: Int64, group: Int64) -> NDArray[np.bool_]:
    """Whether the trajectories of each group lie in more than one tree, bool [num_groups]."""
    some = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    some[group] = tree
    return np.bincount(group, weights=some[group] != tree) > 0
