"""What a user names: a group, a trajectory or a row; and what is there instead if it is not found.

    'a1', ['a10', 'a2', 'b']   ->   DIR: has no trajectory 'a1'; give one of its 3, such as 'a10', 'a2'

A conversation of which tokenisation made several samples names all of them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.analysis.show.wrapping import printable
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Manifest
from treepack.files.parts import open_part
from treepack.pack.files import row_of_table
from treepack.pack.row import Row
from treepack.trajectory import Float64, Int64, Trajectory
from treepack.trie.trie import Trie

COMPARED = 5000  # names before and behind the place of an unknown one that are compared with it
SAMPLE = re.compile(r"/(turn|part)-\d+")  # what tokenisation adds to the id of a conversation of several samples


@dataclass(frozen=True, slots=True)
class SelectedGroup:
    """A group of a trie: its tokens if each trajectory stands alone, and those of the tree of the group alone."""

    group_id: str
    num_trajectories: int
    tokens_flat: int
    tokens_tree: int
    reward: Float64

    @property
    def por(self) -> float:
        return 1 - self.tokens_tree / self.tokens_flat


def groups(trie: Trie) -> list[SelectedGroup]:
    """The groups of a trie by falling overlap, then falling size; O(nodes of every group's paths)."""
    names = trie.trajectories["group_id"].to_pylist()
    parents, sizes, lengths = trie.parent.tolist(), trie.node_length.tolist(), trie.lengths.tolist()
    rewards = trie.trajectories["reward"].to_pylist()
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    found = []
    for name, own in members.items():
        seen: set[int] = set()
        for node in trie.end_node[own].tolist():
            while node >= 0 and node not in seen:
                seen.add(node)
                node = parents[node]
        given = [np.nan if rewards[i] is None else rewards[i] for i in own]
        tokens = sum(lengths[i] for i in own), sum(sizes[node] for node in seen)
        found.append(SelectedGroup(name, len(own), *tokens, np.array(given, np.float64)))
    return sorted(found, key=lambda group: (-group.por, -group.tokens_flat, group.group_id))


def subset(trie: Trie, indices: Sequence[int] | Int64) -> Trie:
    """`trie` with only the trajectories of `indices`, which ascend; its nodes are the same."""
    return replace(trie, end_node=trie.end_node[indices], trajectories=trie.trajectories.take(pa.array(indices)))


def members(trie: Trie, group_id: str, *, where: str) -> list[int]:
    """Indices of the trajectories of a group.

    Raises:
        TreepackError: there is no such group; the nearest are named.
    """
    names = trie.trajectories["group_id"].to_pylist()
    found = [i for i, name in enumerate(names) if name == group_id]
    if not found:
        raise unknown(group_id, set(names), noun="group", where=where)
    return found


def named(wanted: str, trajectory_id: str, source: str) -> bool:
    """Whether `wanted` names a trajectory: its id, that of the conversation it is a sample of, or its file and line."""
    if wanted in (trajectory_id, source, f"{trajectory_id}@{source}"):
        return True
    return trajectory_id.startswith(wanted) and SAMPLE.fullmatch(trajectory_id, len(wanted)) is not None


def trajectories(trie: Trie, wanted: str, *, where: str) -> list[int]:
    """Indices of the trajectories that `wanted` names, in the order of their ids.

    Raises:
        TreepackError: there is none; the nearest are named.
    """
    ids, sources = trie.trajectories["trajectory_id"].to_pylist(), trie.trajectories["source"].to_pylist()
    found = [i for i, name in enumerate(ids) if name == wanted]
    found = found or [i for i, name in enumerate(ids) if named(wanted, name, sources[i])]
    if not found:
        raise unknown(wanted, ids, noun="trajectory", where=where)
    return sorted(found, key=lambda i: (len(ids[i]), ids[i]))


def first_named(
    rollouts: Iterable[Trajectory], wanted: str, *, where: str, skipped: Mapping[str, int]
) -> Iterator[Trajectory]:
    """The first of `rollouts` that `wanted` names, with the further samples of the same record; reads no further.

    Raises:
        TreepackError: there is none; the nearest are named, and what was `skipped` up to the end.
    """
    ids: list[str] = []
    source = None
    for rollout in rollouts:
        if source is not None and rollout.source != source:
            return
        if named(wanted, rollout.trajectory_id, rollout.source):
            source = rollout.source
            yield rollout
        elif source is None:
            ids.append(rollout.trajectory_id)
    if source is None:
        counts = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(skipped.items()))
        raise unknown(wanted, ids, noun="trajectory", where=where + (f" ({counts})" if counts else ""))


def unknown(wanted: str, names: Iterable[str], *, noun: str, where: str) -> TreepackError:
    """The error that says that `wanted` is none of `names`, and which come near."""
    known = sorted(set(names))
    if not known:
        return TreepackError(f"{where}: has no {noun} to show; give other rollouts")
    at = bisect_left(known, wanted)
    compared = known[max(0, at - COMPARED) : at + COMPARED]
    near = get_close_matches(wanted, compared, n=3, cutoff=0.5) or known[:3]
    listed = ", ".join(f"'{printable(name)}'" for name in near)
    listed = listed if len(near) == len(known) else f"such as {listed}"
    return TreepackError(f"{where}: has no {noun} '{printable(wanted)}'; give one of its {len(known):,}, {listed}")


def read_row(directory: Path, manifest: Manifest, number: int) -> Row:
    """Row `number` of a packed directory; reads only the row group that holds it.

    Raises:
        TreepackError: there is no such row; the range is named.
    """
    total = manifest["totals"]["num_rows"]
    if not 0 <= number < total:
        raise TreepackError(f"{directory}: has no row {number}; its rows are 0 to {total - 1}")
    before = 0
    for entry in manifest["files"]:
        if number < before + entry["rows"]:
            part = open_part(directory, entry)
            for group in range(part.num_row_groups):
                size = part.metadata.row_group(group).num_rows
                if number < before + size:
                    return row_of_table(part.read_row_group(group), number - before)
                before += size
        before += entry["rows"]
    raise TreepackError(f"{directory}: its parts hold fewer rows than its manifest says; pack the trie again")


def row_with(directory: Path, manifest: Manifest, wanted: str) -> tuple[Row, int]:
    """The row that holds the trajectory `wanted`, and the index of the trajectory in it.

    Raises:
        TreepackError: there is none; the nearest are named.
    """
    ids: list[str] = []
    number = 0
    for entry in manifest["files"]:
        column = open_part(directory, entry).read(columns=["trajectory_ids"])["trajectory_ids"]
        for own in column.to_pylist():
            for i, name in enumerate(own):
                if named(wanted, name, name):
                    return read_row(directory, manifest, number), i
            ids += own
            number += 1
    raise unknown(wanted, ids, noun="trajectory", where=str(directory))


def is_packed(manifest: Manifest) -> bool:
    """Whether a manifest is that of a packed directory."""
    return bool(manifest["format"] == schema.PACKED_FORMAT)
