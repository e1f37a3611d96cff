"""Look up the group, trajectory or row that a user names, or list the names nearest to an unknown one.

    'a1', ['a10', 'a2', 'b']   ->   DIR: has no trajectory 'a1'; give one of its 3, such as 'a10', 'a2'

If tokenisation made several samples of a conversation, the id of the conversation names all of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from treepack.analysis.show.wrapping import escape_text
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest
from treepack.files.parts import open_part
from treepack.ingest.read_log import without_unused
from treepack.pack.files import row_of_table
from treepack.pack.row import Row
from treepack.sequences import take_rows
from treepack.trajectory import Float64, Int64, Trajectory
from treepack.trie.trie import Trie

# Sorted names on each side of an unknown name that are compared with it: 10,000 comparisons take half a second. The
# right name is among them unless its first letters are wrong.
_NUM_COMPARED = 5000
_SAMPLE = re.compile(r"/(turn|part)-\d+")  # the suffix that tokenisation adds to the id of a conversation


@dataclass(frozen=True, slots=True)
class SelectedGroup:
    """A group of a trie: the tokens of its trajectories one by one, and of a tree that contains only this group."""

    group_id: str
    num_trajectories: int
    tokens_flat: int
    tokens_tree: int
    reward: Float64

    @property
    def por(self) -> float:
        return 1 - self.tokens_tree / self.tokens_flat


def groups(trie: Trie) -> list[SelectedGroup]:
    """Return the groups of a trie, highest overlap first, then the largest; O(nodes on the paths of each group)."""
    names = trie.trajectories["group_id"].to_pylist()
    parents, sizes, lengths = trie.parent.tolist(), trie.node_length.tolist(), trie.lengths.tolist()
    rewards = trie.trajectories["reward"].to_pylist()
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    result = []
    for name, indices in members.items():
        seen: set[int] = set()
        for node in trie.end_node[indices].tolist():
            # The rest of a path that reaches a seen node was seen, too.
            while node >= 0 and node not in seen:
                seen.add(node)
                node = parents[node]
        group_rewards = [np.nan if rewards[i] is None else rewards[i] for i in indices]
        tokens = sum(lengths[i] for i in indices), sum(sizes[node] for node in seen)
        result.append(SelectedGroup(name, len(indices), *tokens, np.array(group_rewards, np.float64)))
    return sorted(result, key=lambda group: (-group.por, -group.tokens_flat, group.group_id))


def subset(trie: Trie, indices: Sequence[int] | Int64) -> Trie:
    """Return `trie` with only the trajectories of `indices`, which ascend; its nodes are the same."""
    return replace(
        trie, end_node=trie.end_node[indices], trajectories=take_rows(trie.trajectories, np.array(indices, np.int64))
    )


def members(trie: Trie, group_id: str, *, where: str) -> list[int]:
    """Return the indices of the trajectories of a group.

    Raises:
        TreepackError: the group does not exist; the error lists the nearest ones.
    """
    names = trie.trajectories["group_id"].to_pylist()
    indices = [i for i, name in enumerate(names) if name == group_id]
    if not indices:
        raise _unknown(group_id, set(names), noun="group", where=where)
    return indices


def _names_trajectory(wanted: str, trajectory_id: str, source: str) -> bool:
    """Return whether `wanted` names a trajectory: by its id, the id of its conversation, or its file and line."""
    if wanted in (trajectory_id, source, f"{trajectory_id}@{source}"):
        return True
    return trajectory_id.startswith(wanted) and _SAMPLE.fullmatch(trajectory_id, len(wanted)) is not None


def trajectories(trie: Trie, wanted: str, *, where: str) -> list[int]:
    """Return the indices of the trajectories that `wanted` names, in the order of their ids.

    Raises:
        TreepackError: `wanted` names no trajectory; the error lists the nearest ids.
    """
    ids, sources = trie.trajectories["trajectory_id"].to_pylist(), trie.trajectories["source"].to_pylist()
    indices = [i for i, name in enumerate(ids) if name == wanted]
    indices = indices or [i for i, name in enumerate(ids) if _names_trajectory(wanted, name, sources[i])]
    if not indices:
        raise _unknown(wanted, ids, noun="trajectory", where=where)
    return sorted(indices, key=lambda i: (len(ids[i]), ids[i]))  # by length first: turn-9, turn-10


def first_named(
    rollouts: Iterable[Trajectory], wanted: str, *, where: str, skipped: Mapping[str, int]
) -> Iterator[Trajectory]:
    """Yield the first of `rollouts` that `wanted` names, and the other samples of its record; stop reading there.

    Raises:
        TreepackError: `wanted` names no rollout; the error lists the nearest ids and the counts of `skipped` records.
    """
    ids: list[str] = []
    source = None
    for rollout in rollouts:
        if source is not None and rollout.source != source:  # samples of one record are consecutive
            return
        if _names_trajectory(wanted, rollout.trajectory_id, rollout.source):
            source = rollout.source
            yield rollout
        elif source is None:
            ids.append(rollout.trajectory_id)
    if source is None:
        error = _unknown(wanted, ids, noun="trajectory", where=where)
        counts, unused = without_unused(skipped)
        listed = [*(f"{reason}: {count:,}" for reason, count in sorted(counts.items())), *filter(None, [unused])]
        raise TreepackError("; ".join([str(error), *listed]))


def _unknown(wanted: str, names: Iterable[str], *, noun: str, where: str) -> TreepackError:
    """Return the error for a `wanted` name that is none of `names`; it lists the nearest ones."""
    known = sorted(set(names))
    if not known:
        return TreepackError(f"{where}: has no {noun} to show; give other rollouts")
    # known [a1, a10, a2, b], wanted a15 -> at 2: neighbours in the sorted list share a prefix with the wanted name
    at = bisect_left(known, wanted)
    compared = known[max(0, at - _NUM_COMPARED) : at + _NUM_COMPARED]
    # 0.5, not the 0.6 of difflib: a short id with half of its letters wrong still finds its neighbour.
    near = get_close_matches(wanted, compared, n=3, cutoff=0.5) or known[:3]
    listed = ", ".join(f"'{escape_text(name)}'" for name in near)
    listed = listed if len(near) == len(known) else f"such as {listed}"
    return TreepackError(f"{where}: has no {noun} '{escape_text(wanted)}'; give one of its {len(known):,}, {listed}")


def read_row(directory: Path, manifest: Manifest, number: int) -> Row:
    """Return row `number` of a packed directory; read only the row group that contains it.

    Raises:
        TreepackError: the row does not exist; the error gives the range of rows.
    """
    total = manifest["totals"]["num_rows"]
    if not 0 <= number < total:
        raise TreepackError(f"{directory}: has no row {number}; its rows are 0 to {total - 1}")
    before = 0
    for entry in manifest["files"]:
        if number < before + entry["rows"]:
            part = open_part(directory, entry, schema.PACKED)
            for group, size in enumerate(part.group_sizes):
                if number < before + size:
                    return row_of_table(part.read_group(group), number - before)
                before += size
        before += entry["rows"]
    raise TreepackError(f"{directory}: its parts have fewer rows than its manifest lists; pack the trie again")


def row_with(directory: Path, manifest: Manifest, wanted: str) -> tuple[Row, int]:
    """Return the row that contains the trajectory `wanted`, and the index of the trajectory in the row.

    Raises:
        TreepackError: `wanted` names no trajectory; the error lists the nearest ids.
    """
    ids: list[str] = []
    number = 0
    for entry in manifest["files"]:
        part = open_part(directory, entry, schema.PACKED)
        for row_ids in part.read(["trajectory_ids"])["trajectory_ids"].to_pylist():
            for i, name in enumerate(row_ids):
                if _names_trajectory(wanted, name, name):
                    return read_row(directory, manifest, number), i
            ids += row_ids
            number += 1
    raise _unknown(wanted, ids, noun="trajectory", where=str(directory))


def is_packed(manifest: Manifest) -> bool:
    """Return whether a manifest belongs to a packed directory."""
    return bool(manifest["format"] == schema.PACKED_FORMAT)
