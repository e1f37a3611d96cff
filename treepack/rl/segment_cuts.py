"""Starts of the segments of a group's rollouts: recorded, at turns, at branches of the trie, or every N tokens.

    Trie, group of each trajectory, segment --find_cuts--> SegmentCuts(owner, start)

        1 2 3 | 4 5 6 | 7 8       d  trained: 4 5 and 7 8, so cut at 3 and 6
        1 2 3   4 5 6 | 9         i  trained: only 9; a continuation of d, recorded with its prompt
        1 2 3 | 4 5 6 | 9            i takes over the cut of d at 3, so both share the segment 4 5 6

A rollout that was sampled from inside another one is recorded as a prompt, which trains nothing, and a response. Its
prompt is cut at the turns of the rollout that it continues (`group_tree.find_origins`). It takes over all cuts of that
rollout within the tokens that both share, including cuts that the other rollout took over itself. Its own cuts start
at its first trained token. Therefore the cuts of rollouts that start at the prompt never change when continuations are
added. N tokens are counted from the first token of a trajectory's path that any trajectory of its group trains there.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.metadata import parse_metadata
from treepack.ingest.readers.fields.rollout_facts import METADATA_DICTS, SEGMENT_IDS, SEGMENTS
from treepack.rl.group_tree import NodePaths, TrajectoryOrigins, find_origins, group_tree
from treepack.sequences import SpanView
from treepack.trajectory import Int64, positions
from treepack.trie.trie import Trie

_METHODS = ("auto", "recorded", "turn", "node")
_EXPECTED = "expected the ascending token offsets of its segments, or --segment node"
_MAX_SIZE = 2**31 - 1  # tokens: positions are int32 in files, so a longer segment cannot exist


class SegmentCuts(NamedTuple):
    """The token `start` of every segment, and its `owner`, an index into the members; int64, distinct, in any order.

    `segment` is the method that was used: the requested one, or the one that "auto" chose. A member may have no cuts.
    `sample` int64 is a code of the recorded id of every segment, None if no member has ids.
    """

    segment: str
    owner: Int64
    start: Int64
    sample: Int64 | None = None


def find_cuts(trie: Trie, paths: NodePaths, members: Int64, group: Int64, *, segment: str) -> SegmentCuts:
    """Find the starts of the segments of the trajectories `members` of `trie` (ascending); `group` are codes from 0.

    `segment` has the values of `segments.segment_tree`; `paths` are the paths of the trie.

    Raises:
        TreepackError: unknown `segment`, or recorded offsets that are missing or malformed.
    """
    if segment.isdecimal() and 0 < int(segment) <= _MAX_SIZE:
        return SegmentCuts(segment, *_even_cuts(trie, paths, members, group, size=int(segment)))
    if segment not in _METHODS:
        raise TreepackError(f"segment is {segment!r}; expected {', '.join(_METHODS)} or a number of tokens")
    if segment == "turn":
        return SegmentCuts(segment, *_turn_cuts(trie, paths, members, group))
    recorded = None if segment == "node" else _complete_segments(trie, members)
    if recorded is not None:
        return _recorded_cuts(recorded, group)
    if segment == "recorded":
        raise TreepackError("no trajectory has 'segments' in its metadata; record them or give another --segment")
    return SegmentCuts("node", *_branch_cuts(trie, paths, members, group))


def first_trained(trie: Trie, members: Int64) -> Int64:
    """Return the first trained token of each member, or its length if it has none."""
    spans = SpanView.of(trie.trajectories)
    first = trie.lengths.copy()
    # Trajectory i has the spans offsets[i] .. offsets[i + 1] - 1: offsets [0, 2, 2, 3] -> trajectories 0 and 2 train.
    trained = np.flatnonzero(np.diff(spans.offsets))
    first[trained] = spans.starts[spans.offsets[trained]]
    return first[members]


def _origins(
    trie: Trie, paths: NodePaths, members: Int64, group: Int64, *, first: Int64, cuts: tuple[Int64, Int64]
) -> TrajectoryOrigins:
    """Find origins by `group_tree.find_origins`, preferring the earlier cut at the first place where cuts differ."""
    # If all members of a group start to train at the same token, none of them continues another.
    if (first == first[np.unique(group, return_index=True)[1]][group]).all():
        return TrajectoryOrigins(np.full(len(members), -1), np.zeros(len(members), np.int64))
    owner, start = cuts
    # Big-endian bytes sort as the lists of numbers do. The end marker is above every cut, so of [3] and [3, 6] the
    # longer list is first: 00000003 00000006 ffffffff < 00000003 ffffffff.
    begin = (4 * np.searchsorted(owner, np.arange(len(members) + 1))).tolist()
    packed, end = start.astype(">u4").tobytes(), b"\xff" * 4
    lists = [packed[a:b] + end for a, b in itertools.pairwise(begin)]
    ranks = {cut_list: rank for rank, cut_list in enumerate(sorted(set(lists)))}
    return find_origins(group_tree(trie, paths, members, group), first, np.array([ranks[one] for one in lists]))


def _even_cuts(trie: Trie, paths: NodePaths, members: Int64, group: Int64, *, size: int) -> tuple[Int64, Int64]:
    """Cut every `size` tokens, starting at the first trained token of the rollout at the start of the path."""
    first = first_trained(trie, members)
    firsts = np.arange(len(members)), first
    origin = _origins(trie, paths, members, group, first=first, cuts=firsts).origin
    # Follow continuations of continuations to the rollout that starts at the prompt: origin [-1, 0, 1] -> [0, 0, 0].
    source = np.where(origin < 0, np.arange(len(members)), origin)
    while not np.array_equal(source, further := source[source]):
        source = further
    begin = first[source]
    # ceil((length - begin) / size) cuts each: lengths [8, 7], begin [3, 3], size 2 -> counts [3, 2].
    counts = -((begin - trie.lengths[members]) // size)
    owner = np.repeat(np.arange(len(members)), counts)
    # Number the cuts of each owner from 0: counts [3, 2] -> [0, 1, 2, 0, 1], so the cuts are 3 5 7 and 3 5.
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, begin[owner] + number * size


def _turn_cuts(trie: Trie, paths: NodePaths, members: Int64, group: Int64) -> tuple[Int64, Int64]:
    """Cut at each run of trained tokens, and within a continued prompt at the cuts of its origin."""
    owner, start = runs = _trained_runs(trie, members)
    origins = _origins(trie, paths, members, group, first=first_trained(trie, members), cuts=runs)
    # d and i of the header: runs at 3 and 6 of d, 6 of i; i, which continues d, takes over 3.
    heir, inherited = _inherited_cuts(owner, start, origins)
    return np.concatenate([owner, heir]), np.concatenate([start, inherited])


def _trained_runs(trie: Trie, members: Int64) -> tuple[Int64, Int64]:
    """Return owner and first token of each run of trained tokens, ascending."""
    spans = SpanView.of(trie.trajectories)
    owner = span_owners(trie, spans, members)
    # Spans of different weight may adjoin. [3, 5) and [5, 6) are one run, [3, 5) and [6, 8) are two.
    is_start = owner >= 0
    is_start[1:] &= (owner[1:] != owner[:-1]) | (spans.starts[1:] != spans.ends[:-1])
    return owner[is_start], spans.starts[is_start].astype(np.int64)


def span_owners(trie: Trie, spans: SpanView, members: Int64) -> Int64:
    """Return the index into `members` of the trajectory of each span, -1 for other trajectories; int64 [num_spans]."""
    index = np.full(trie.num_trajectories, -1)
    index[members] = np.arange(len(members))
    return np.repeat(index, np.diff(spans.offsets))


def _inherited_cuts(owner: Int64, start: Int64, origins: TrajectoryOrigins) -> tuple[Int64, Int64]:
    """Return the cuts that each trajectory takes over from its origin: owner and token of each.

    `start` are the cuts at trained runs, ascending by `owner`. The loop works in rounds: a trajectory is ready in the
    round after its origin, so a continuation of a continuation also receives the cuts that its origin took over.
    """
    count = len(origins.origin)
    # Cuts of trajectory i: start[own_begin[i]:own_begin[i + 1]], and after its round also pool[begin[i]:][:size[i]].
    own_begin = np.searchsorted(owner, np.arange(count + 1))
    pool, begin, size = np.zeros(0, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    owners = [np.zeros(0, np.int64)]
    done, waiting = origins.origin < 0, np.flatnonzero(origins.origin >= 0)
    while len(waiting):
        is_ready = done[origins.origin[waiting]]
        ready, waiting = waiting[is_ready], waiting[~is_ready]
        origin = origins.origin[ready]
        heir, cut = _slices(
            [(start, own_begin[origin], own_begin[origin + 1]), (pool, begin[origin], begin[origin] + size[origin])]
        )
        # Only cuts before the first token that the two do not share: of 3 and 6 with shared = 6, i takes 3.
        shared = cut < origins.shared[ready][heir]
        heir, cut = heir[shared], cut[shared]
        size[ready] = np.bincount(heir, minlength=len(ready))
        begin[ready] = len(pool) + np.cumsum(size[ready]) - size[ready]
        # The slices come array by array; a stable sort by heir makes each heir's cuts contiguous in the pool:
        # heir [0, 1, 0], cut [3, 4, 6] -> size [2, 1], cuts [3, 6, 4] added to the pool.
        pool = np.concatenate([pool, cut[np.argsort(heir, kind="stable")]])
        owners.append(np.repeat(ready, size[ready]))
        done[ready] = True
    return np.concatenate(owners), pool


def _slices(parts: list[tuple[Int64, Int64, Int64]]) -> tuple[Int64, Int64]:
    """Return the values [start[i], stop[i]) of each of several arrays, after the i of each value."""
    owners, values = [], []
    for array, start, stop in parts:
        owners.append(np.repeat(np.arange(len(start)), stop - start))
        values.append(array[positions(start, stop)])
    return np.concatenate(owners), np.concatenate(values)


class _RecordedSegments(NamedTuple):
    """The lists `segments` and `segment_ids` in the metadata of a rollout, and the rollout's `source` for messages."""

    source: str
    starts: list[int]
    ids: list[int] | None


def recorded_segments(trie: Trie, members: Int64) -> list[_RecordedSegments | None]:
    """Return the segments in the metadata of each of the `members`, None if it has none.

    Raises:
        TreepackError: offsets or ids are malformed.
    """
    table: pa.Table = trie.trajectories.select(["metadata", "source"]).take(pa.array(members))
    segments: list[_RecordedSegments | None] = [None] * len(members)
    lengths = trie.lengths[members].tolist()
    # A search for the name is far cheaper than parsing: most tries record no segments.
    for i in np.flatnonzero(pc.match_substring(table["metadata"], f'"{SEGMENTS}"').to_numpy()).tolist():
        offsets, ids = _recorded_lists(table["metadata"][i].as_py(), table["source"][i].as_py())
        if offsets is None:  # the word occurs somewhere else in the metadata
            continue
        source = table["source"][i].as_py()
        if fault := _fault(offsets, lengths[i]):
            raise TreepackError(f"{source}: {fault}; {_EXPECTED}")
        if fault := _fault_of_ids(ids, len(offsets)):
            raise TreepackError(f"{source}: {fault}; expected one integer per offset in '{SEGMENTS}'")
        segments[i] = _RecordedSegments(source, offsets, ids)
    return segments


def _complete_segments(trie: Trie, members: Int64) -> list[_RecordedSegments] | None:
    """Return the segments in the metadata of all `members`, or None if no member has any.

    Raises:
        TreepackError: some members have offsets and others do not, or offsets or ids are malformed.
    """
    segments = recorded_segments(trie, members)
    complete = [each for each in segments if each is not None]
    if complete and len(complete) < len(segments):
        source = trie.source(members[segments.index(None)])
        fault = f"its metadata has no '{SEGMENTS}' and that of other trajectories has"
        raise TreepackError(f"{source}: {fault}; {_EXPECTED}")
    return complete or None


def _recorded_cuts(recorded: list[_RecordedSegments], group: Int64) -> SegmentCuts:
    """Return the recorded offsets of all members as cuts.

    Raises:
        TreepackError: some rollouts of a group have ids of their segments and others do not.
    """
    has_ids: dict[int, bool] = {}
    for rollout, code in zip(recorded, group.tolist(), strict=True):
        if has_ids.setdefault(code, rollout.ids is not None) != (rollout.ids is not None):
            raise TreepackError(
                f"{rollout.source}: of the rollouts of its group, some have 'segment_ids' and others do not; "
                "record them in each one, or give --segment node"
            )
    owner = np.repeat(np.arange(len(recorded)), [len(rollout.starts) for rollout in recorded])
    start = np.array([offset for rollout in recorded for offset in rollout.starts], np.int64)
    if not any(has_ids.values()):
        return SegmentCuts("recorded", owner, start)
    # Ids may exceed int64, so number them: [[5, 2**63], [5, 9]] -> [0, 1, 0, 2]. Ids are only compared within a group,
    # and all rollouts of such a group have them.
    codes: dict[int, int] = {}
    numbers = (number for rollout in recorded for number in rollout.ids or [0] * len(rollout.starts))
    sample = [codes.setdefault(number, len(codes)) for number in numbers]
    return SegmentCuts("recorded", owner, start, np.array(sample, np.int64))


def _recorded_lists(metadata: str, source: str) -> tuple[Any, Any]:
    """Return "segments" and "segment_ids" of a metadata object or of an object nested in it, unchecked."""
    fields = parse_metadata(metadata, source)
    nested = [fields[name] for name in sorted(METADATA_DICTS) if isinstance(fields.get(name), dict)]
    level: dict[str, Any] = next((level for level in (fields, *nested) if SEGMENTS in level), {})
    return level.get(SEGMENTS), level.get(SEGMENT_IDS)


def _fault(offsets: Any, length: int) -> str | None:
    if not offsets or not _is_integers(offsets):
        return "'segments' is not a list of integers"
    if any(a >= b for a, b in itertools.pairwise(offsets)):
        return "'segments' does not ascend"
    if not 0 < offsets[0] <= offsets[-1] < length:
        return f"'segments' leaves 1 .. {length - 1}, the tokens after the first"
    return None


def _fault_of_ids(ids: Any, num_segments: int) -> str | None:
    if ids is None:
        return None
    if not _is_integers(ids):
        return "'segment_ids' is not a list of integers"
    return f"'segment_ids' has {len(ids)} numbers for {num_segments} segments" if len(ids) != num_segments else None


def _is_integers(value: Any) -> bool:
    # type() because True and False are integers for isinstance.
    return isinstance(value, list) and all(type(each) is int for each in value)


def _branch_cuts(trie: Trie, paths: NodePaths, members: Int64, group: Int64) -> tuple[Int64, Int64]:
    """Cut after every node of the trie where two or more trajectories of a group continue differently.

    In the tree of the group, only nodes with several children are branches. At any other node a trajectory ends inside
    another one, and nothing is cut.
    """
    tree = group_tree(trie, paths, members, group)
    # Point every node at its nearest ancestor that branches: the loop skips ancestors with one child.
    up = tree.up.copy()
    branches = np.bincount(up[up >= 0], minlength=len(up)) > 1
    while (idle := (up >= 0) & ~branches[up]).any():
        up[idle] = up[up[idle]]

    # Climb from all ends at once, one branch a round; trajectories drop out at the root. In the header of group_tree,
    # a and b are cut at 4 and 2, c at 2.
    owners, starts = [], []
    at, owner = up[tree.end], np.arange(len(members))
    while (inside := at >= 0).any():
        at, owner = at[inside], owner[inside]
        owners.append(owner)
        starts.append(tree.paths.path_length[at])
        at = up[at]
    # If first tokens differ, the group shares no token at all, so its root segment is empty: cut at 0.
    apart = np.flatnonzero(_in_several_trees(trie.tree_id[trie.end_node[members]].astype(np.int64), group)[group])
    return np.concatenate([apart, *owners]), np.concatenate([np.zeros_like(apart), *starts])


def _in_several_trees(tree: Int64, group: Int64) -> NDArray[np.bool_]:
    """Mark each group whose trajectories are in more than one tree, bool [num_groups]."""
    # Compare with any one member: tree [4, 4, 5], group [0, 0, 0] -> 5 remains, 4 != 5 twice -> [True].
    sample = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    sample[group] = tree
    return np.bincount(group, weights=sample[group] != tree) > 0
