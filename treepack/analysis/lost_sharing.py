"""Why rollouts share less than they should: every token of a trie laid down for a reason, and what lost sharing cost.

    Trie --laid_down--> which tokens each trajectory adds, and how many of them it should have shared
         --explain----> tokens by reason, the causes of lost sharing with an example of each

Lay the trajectories down one after another, each adding the nodes that none before it passes: what they add sums up to
N_tree. The order is that of expectation, by group, rollout and call, so that what a trajectory should continue comes
before it:

    first call of the group's first rollout    adds all it has
    first call of another rollout              should share its prompt with that one
    later call of a rollout                    should begin with the call before it: its prompt and what it generated

    group's first     P P P P a a a
    another rollout   P P p p b b b        adds  p p b b b: p p are lost, for they were to be shared, b b b are its own
    its next call     P P p p b b b o c    adds  o c: nothing is lost

Calls are told by the names `<rollout>/turn-<k>` and `<rollout>/part-<k>`. A trajectory whose prompt goes on where that
of the other ends has lost nothing. Why tokens were lost is read from the texts on both sides of the parting
(`differences`), so it needs the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.analysis.text_differences import Difference, classify
from treepack.columns import SpanView
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

CALL = re.compile(r"(?P<rollout>.*)/(?:turn|part)-(?P<number>\d+)(?:@.*)?", re.DOTALL)
MOST = 10_000
CONTEXT, WINDOW = 48, 160
UNREAD = {False: "prompt differs", True: "history differs"}

Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class LaidDown:
    """What each trajectory of a trie adds when they are laid down in the order of expectation; all [num_trajectories].

    Trajectory i adds the tokens from `start` on, int64, of which `lost`, int64, should have been shared with trajectory
    `expected`, int64, -1 for the first of a group. Both have `common` tokens in common, int64, counted where something
    is lost and else 0. `is_call`: it should have continued the call before it, bool.
    """

    start: Int64
    lost: Int64
    expected: Int64
    common: Int64
    is_call: NDArray[np.bool_]


def laid_down(trie: Trie) -> LaidDown:
    """What each trajectory adds, and what of it should have been shared. O(num_nodes) besides sorting names."""
    expected, is_call, rank = _expectations(trie)
    start = _starts(trie, rank)
    begin, end = _trained_range(trie)
    known = expected >= 0
    should = np.where(known, np.minimum(begin, np.where(is_call, end[expected], begin)), 0)
    lost, common = np.zeros_like(start), np.zeros_like(start)
    parent, ends, path_length = trie.parent.tolist(), trie.end_node.tolist(), trie.path_length
    for i in np.flatnonzero(start < should).tolist():
        other = int(expected[i])
        meet = _meeting(parent, ends[i], ends[other])
        shared = 0 if meet < 0 else int(path_length[meet])
        if shared < (end if is_call[i] else begin)[other]:
            lost[i], common[i] = should[i] - start[i], shared
    return LaidDown(start, lost, expected, common, is_call)


def _expectations(trie: Trie) -> tuple[Int64, NDArray[np.bool_], Int64]:
    """The trajectory that each one should share with, whether as the call before, and its place in the order."""
    names: list[str] = trie.trajectories["trajectory_id"].to_pylist()
    groups: list[str] = trie.trajectories["group_id"].to_pylist()
    keys = []
    for name, group, step in zip(names, groups, trie.step_rank.tolist(), strict=True):
        found = CALL.fullmatch(name)
        rollout, number = (found["rollout"], int(found["number"])) if found else (name, 0)
        keys.append((step, group, rollout, number, name))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    expected, is_call = np.full(len(keys), -1), np.zeros(len(keys), bool)
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.arange(len(order))
    first = before = order[0]
    for i in order[1:]:
        if keys[i][:2] != keys[first][:2]:
            first = i
        elif keys[i][:3] == keys[before][:3]:
            expected[i], is_call[i] = before, True
        else:
            expected[i] = first
        before = i
    return expected, is_call, rank


def _starts(trie: Trie, rank: Int64) -> Int64:
    """The first token that each trajectory adds; its length if it adds none."""
    parent = trie.parent.tolist()
    found = np.full(trie.num_nodes, len(rank))
    np.minimum.at(found, trie.end_node, rank)
    first: list[int] = found.tolist()
    for node in range(len(parent) - 1, 0, -1):
        above = parent[node]
        if above >= 0 and first[node] < first[above]:
            first[above] = first[node]
    holder = np.empty(len(rank), np.int64)
    holder[rank] = np.arange(len(rank))
    start = trie.lengths.copy()
    np.minimum.at(start, holder[first], trie.depth)
    return start


def _trained_range(trie: Trie) -> tuple[Int64, Int64]:
    """First trained token of each trajectory and one past its last; its length and 0 where it has none."""
    spans = SpanView.of(trie.trajectories)
    begin, end = trie.lengths.copy(), np.zeros(trie.num_trajectories, np.int64)
    some = np.flatnonzero(np.diff(spans.offsets))
    begin[some] = spans.starts[spans.offsets[some]]
    end[some] = spans.ends[spans.offsets[some + 1] - 1]
    return begin, end


def _meeting(parent: list[int], a: int, b: int) -> int:
    """The last node that the paths to `a` and `b` share, -1 if none: a parent comes before its children."""
    while a != b:
        a, b = (parent[a], b) if a > b else (a, parent[b])
    return a


def explain(trie: Trie, decode: Decode | None = None, *, most: int = MOST) -> dict[str, Any]:
    """Why each token of `trie` was laid down, as plain values ready for JSON.

    `laid_down` maps a reason to tokens: "first" of a group; own "sampling"; "environment", another observation after
    the same actions; the "next call" of a rollout; a "longer prompt"; what comes "behind" a loss; and "lost", whose
    causes are listed under `lost`, the dearest first, each with its tokens, partings and an example. The reasons sum up
    to N_tree. `decode` takes lists of token ids to texts; without it causes are not told apart. Of the partings the
    `most` dearest are read.
    """
    found = laid_down(trie)
    added = trie.lengths - found.start
    base = found.expected < 0
    reason = np.where(found.is_call, "next call", _own_reason(trie, found.start))
    parts = {
        name: int(added[~base & (found.lost == 0) & (reason == name)].sum())
        for name in ("sampling", "environment", "next call", "longer prompt")
    }
    lost = int(found.lost.sum())
    behind = int((added - found.lost)[found.lost > 0].sum())
    alone = _num_alone(trie)
    return {
        "laid_down": {"first": int(added[base].sum()), **parts, "behind": behind, "lost": lost},
        "lost": _causes(trie, found, decode, most=most) if lost else [],
        "num_alone": alone,
    }


def _own_reason(trie: Trie, start: Int64) -> NDArray[np.str_]:
    """Why each trajectory leaves the others where it does, told by what its first own token is."""
    spans = SpanView.of(trie.trajectories)
    begin, _ = _trained_range(trie)
    owner = np.repeat(np.arange(trie.num_trajectories), np.diff(spans.offsets))
    reach = int(trie.lengths.max()) + 1
    at = np.searchsorted(owner * reach + spans.starts, np.arange(trie.num_trajectories) * reach + start, "right") - 1
    trained = (at >= 0) & (owner[at] == np.arange(trie.num_trajectories)) & (start < spans.ends[at])
    return np.where(trained, "sampling", np.where(start < begin, "longer prompt", "environment"))


def _num_alone(trie: Trie) -> int:
    """Trajectories that are the only one of their group, so that nothing can be said of their prompts."""
    groups = np.array(trie.trajectories["group_id"].to_pylist())
    _, code, count = np.unique(groups, return_inverse=True, return_counts=True)
    return int((count[code] == 1).sum())


def _causes(trie: Trie, found: LaidDown, decode: Decode | None, *, most: int) -> list[dict[str, Any]]:
    """The causes of what was lost, the dearest first."""
    partings = np.flatnonzero(found.lost)
    partings = partings[np.argsort(-found.lost[partings], kind="stable")]
    ids: list[str] = trie.trajectories["trajectory_id"].to_pylist()
    causes: dict[str, dict[str, Any]] = {}
    differences = _read(trie, found, partings[:most].tolist(), decode)
    for place, i in enumerate(partings.tolist()):
        difference = differences[place] if place < len(differences) else None
        cause = UNREAD[bool(found.is_call[i])] if decode is None else "not read"
        cause = difference.cause if difference else cause
        entry = causes.setdefault(cause, {"cause": cause, "tokens": 0, "num_partings": 0})
        entry["tokens"] += int(found.lost[i])
        entry["num_partings"] += 1
        if "example" not in entry:
            entry["example"] = {
                "trajectory_id": ids[i],
                "other": ids[int(found.expected[i])],
                "position": int(found.common[i]),
                **(difference.texts if difference else {}),
            }
    return sorted(causes.values(), key=lambda entry: (-entry["tokens"], entry["cause"]))


def _read(trie: Trie, found: LaidDown, partings: list[int], decode: Decode | None) -> list[Difference]:
    """The difference at each of `partings`, in order; none without `decode`."""
    if decode is None or not partings:
        return []
    begin, end = _trained_range(trie)
    windows: list[list[int]] = []
    whole: list[bool] = []
    for i in partings:
        other, at = int(found.expected[i]), int(found.common[i])
        for which, limit in ((other, (end if found.is_call[i] else begin)[other]), (i, begin[i])):
            stop = min(int(limit), at + WINDOW)
            windows.append(_path_tokens(trie, int(trie.end_node[which]), max(0, at - CONTEXT), stop))
            whole.append(stop == limit)
    texts = decode(windows)
    return [
        classify(
            texts[2 * k],
            texts[2 * k + 1],
            is_call=bool(found.is_call[i]),
            whole=(whole[2 * k], whole[2 * k + 1]),
        )
        for k, i in enumerate(partings)
    ]


def _path_tokens(trie: Trie, node: int, start: int, stop: int) -> list[int]:
    """Tokens [start, stop) of the path that ends with `node`."""
    parts: list[list[int]] = []
    while node >= 0:
        first, depth = int(trie.node_start[node]), int(trie.depth[node])
        length = int(trie.node_start[node + 1]) - first
        a, b = max(start - depth, 0), min(stop - depth, length)
        if a < b:
            parts.append(trie.tokens[first + a : first + b].tolist())
        if depth <= start:
            break
        node = int(trie.parent[node])
    return [token for part in reversed(parts) for token in part]
