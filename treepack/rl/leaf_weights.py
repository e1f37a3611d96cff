"""Weights of the leaves of sampled trees, which make means over rollouts unbiased.

    Trie --leaf_weights--> LeafWeights(all, before_fallback), or None if nothing is recorded

        prompt -+- A -+- C    leaf_weight 1/4     A tree sampler records the product of 1 / forks on the path of each
                |     '- D                1/4     leaf. The weights of a tree sum to 1. A plain mean is biased: paths
                '- B                      1/2     that end early stop forking while longer ones multiply.

        K = 2 continuations of A:    C, D   1/4 -> 1/8      A has c = 2 children of weight 1/2 together, and afterwards
                                     E, F          1/8      c + K = 4 children, of 1/8 each

A continuation names the rollout that it was cut from (`parent_rollout`) and the number of tokens that it repeats
(`parent_tokens`). Its weight follows from the place of these tokens in the tree. This is exact if the number of
continuations does not depend on the outcome of that rollout. A fallback of the sampler does depend on outcomes, so
estimates use the weights from before the first fallback, in which the leaves that it added have the weight 0.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treepack.errors import TreepackError
from treepack.files.metadata import parse_metadata
from treepack.ingest.readers.fields.rollout_facts import marked
from treepack.ingest.readers.fields.values import shown
from treepack.rl.group_tree import group_codes, node_paths, token_places
from treepack.rl.segment_cuts import first_trained, recorded_segments
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie

WEIGHT, BEFORE = "leaf_weight", "leaf_weight_before_fallback"
PARENT, PARENT_TOKENS = "parent_rollout", "parent_tokens"


@dataclass(frozen=True, slots=True)
class LeafWeights:
    """The weight of each trajectory, float64 [num_trajectories] each; sums of 1 per group and training step.

    `before_fallback` is the weight that a leaf had before the first fallback of its tree, 0 for a leaf that a fallback
    added. It equals `all` in a tree without a fallback.
    """

    all: Float64
    before_fallback: Float64

    def of_pairs(self, owner: Int64, part: Int64, *, at_least: int = 1) -> Float64:
        """Return weights for means over the trajectories `owner` of each `part`; all of them are arrays [num_pairs].

        The weights are those before the first fallback. A part with fewer than `at_least` positive ones gets the
        weights `all`, because its leaves came from a fallback, or equal weights if these do not suffice either.
        """
        # before [1/2, 1/2, 0, 0], owner [0, 1, 2, 2, 3], part [0, 0, 0, 1, 1]: part 1 takes `all` of 2 and 3.
        weight = self.before_fallback[owner]
        for other in (self.all[owner], np.ones(len(owner))):
            few = np.bincount(part, weights=weight > 0) < at_least
            weight = np.where(few[part], other, weight)
        return weight

    def with_fallback(self) -> LeafWeights:
        """Return the weights `all` for both, so that leaves of a fallback count."""
        return LeafWeights(self.all, self.all)

    def times_size(self, group: Int64) -> LeafWeights:
        """Return the weights times the number of trajectories of their `group`, so that equal weights are 1."""
        size = np.bincount(group)[group]
        return LeafWeights(self.all * size, self.before_fallback * size)


def leaf_weights(trie: Trie) -> LeafWeights | None:
    """Return the weights of the trajectories of `trie`, or None if no trajectory records any.

    Several trees of a group count equally. A group without weights has equal ones, and so do the rollouts of a group
    whose continuations alone are recorded.

    Raises:
        TreepackError: some rollouts of a group have weights and others do not, impossible weights, or a continuation
            that does not continue a rollout of its group.
    """
    recorded = _read(trie)
    if recorded is None:
        return None
    group = group_codes(trie)
    is_base = np.ones(trie.num_trajectories, bool)
    is_base[list(recorded.parents)] = False
    known = ~np.isnan(recorded.weights[0])
    # Groups with a weight of any rollout that starts at the prompt; weights of continuations only count below a prefix.
    weighted = np.bincount(group, weights=known & is_base) > 0
    missing = np.flatnonzero(weighted[group] & is_base & ~known)
    if len(missing):
        raise TreepackError(
            f"{trie.source(missing[0])}: has no {WEIGHT} and other rollouts of its group have one; record it in all "
            "rollouts of the group, or give them another group_id"
        )
    weights = np.where(is_base, np.where(weighted[group], recorded.weights, 1.0), 0.0)
    for name, values in zip((WEIGHT, BEFORE), weights, strict=True):
        total = np.bincount(group, weights=values)
        empty = np.flatnonzero((total[group] == 0) & is_base)
        if len(empty):
            raise TreepackError(
                f"{trie.source(empty[0])}: {name} is 0 in all rollouts of its group; build the trie from all of them"
            )
        values /= np.where(total > 0, total, 1.0)[group]
    _add_continuations(trie, group, recorded, weights)
    return LeafWeights(*weights)


def required_leaf_weights(trie: Trie) -> LeafWeights:
    """Return `leaf_weights` of a trie that must have them.

    Raises:
        TreepackError: it has none, or any error of `leaf_weights`.
    """
    weights = leaf_weights(trie)
    if weights is None:
        raise TreepackError(
            f"no rollout of the trie has a {WEIGHT}; sample the rollouts with treepack rollout, or leave out "
            "--leaf-weights"
        )
    return weights


@dataclass(frozen=True, slots=True)
class _RecordedWeights:
    """`weights` float64 [2, n]: leaf weight and that before the first fallback, NaN if a rollout has none.

    `parents` maps each continuation to the index of the rollout that it was cut from, and the number of tokens.
    """

    weights: Float64
    parents: dict[int, tuple[int, int]]


def _read(trie: Trie) -> _RecordedWeights | None:
    """Read the metadata of all trajectories; None if there are neither weights nor continuations."""
    table: pa.Table = trie.trajectories
    # A search for the names is far cheaper than parsing: most tries have none.
    mentioned = pc.match_substring_regex(table["metadata"], f'"({WEIGHT}|{BEFORE}|{PARENT})"').to_numpy()
    weights = np.full((2, trie.num_trajectories), np.nan)
    named: dict[int, tuple[str, int]] = {}
    lengths = trie.lengths.tolist()
    for i in np.flatnonzero(mentioned).tolist():
        fields = parse_metadata(table["metadata"][i].as_py(), trie.source(i))
        weight, before = (_weight(trie, i, fields, name) for name in (WEIGHT, BEFORE))
        if weight is None and before is not None:
            raise TreepackError(f"{trie.source(i)}: has a {BEFORE} and no {WEIGHT}; record both or neither")
        if weight is not None:
            weights[:, i] = weight, weight if before is None else before
        name, num_tokens = marked(fields, PARENT), marked(fields, PARENT_TOKENS)
        if name is not None and num_tokens is not None:
            if type(name) not in (str, int) or type(num_tokens) is not int or not 0 < num_tokens < lengths[i]:
                raise TreepackError(
                    f"{trie.source(i)}: continues {shown(num_tokens)} tokens of the rollout {shown(name)}; expected "
                    f"an id and 1 to {lengths[i] - 1} tokens"
                )
            named[i] = str(name), num_tokens
    if not named and np.isnan(weights[0]).all():
        return None
    index_of = {name: i for i, name in enumerate(table["trajectory_id"].to_pylist())} if named else {}
    parents: dict[int, tuple[int, int]] = {}
    for i, (name, num_tokens) in named.items():
        if name not in index_of:
            raise TreepackError(
                f"{trie.source(i)}: continues the rollout {name!r}, which the trie does not contain; build one trie "
                "from rollouts and their continuations"
            )
        parents[i] = index_of[name], num_tokens
    return _RecordedWeights(weights, parents)


def _weight(trie: Trie, index: int, fields: dict[str, Any], name: str) -> float | None:
    value = marked(fields, name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < np.inf:
        raise TreepackError(f"{trie.source(index)}: {name} is {shown(value)}; expected a finite number of 0 or more")
    return float(value)


@dataclass(frozen=True, slots=True)
class _SampledPath:
    """The sampled segments of a rollout: their first tokens `starts`, and the number of each one's node in `nodes`."""

    starts: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    def above(self, num_tokens: int) -> int:
        """Return the node that contains the token before `num_tokens`, -1 for the prompt."""
        at = bisect.bisect_left(self.starts, num_tokens)
        return self.nodes[at - 1] if at else -1

    def child(self, num_tokens: int) -> int:
        """Return the node that starts at token `num_tokens`, -1 if the path continues inside a segment."""
        at = bisect.bisect_left(self.starts, num_tokens)
        return self.nodes[at] if at < len(self.starts) and self.starts[at] == num_tokens else -1


def _add_continuations(trie: Trie, group: Int64, recorded: _RecordedWeights, weights: Float64) -> None:
    """Give continuations their part of `weights` [2, n], in place, parents before their continuations.

    Raises:
        TreepackError: a continuation differs from its parent in group or tokens, or names itself as parent.
    """
    if not recorded.parents:
        return
    _check_parents(trie, group, recorded)
    touched = np.unique(group[list(recorded.parents)])
    members = np.flatnonzero(np.isin(group, touched))
    own = dict(zip(members.tolist(), _own_segments(trie, members), strict=True))
    numbers: dict[Any, int] = {}
    paths: dict[int, _SampledPath] = {}
    in_tree: dict[int, list[int]] = defaultdict(list)  # by group, so far

    def place(i: int) -> None:
        parent, num_tokens = recorded.parents.get(i, (-1, 0))
        path = _SampledPath()
        if parent >= 0:
            above = bisect.bisect_left(paths[parent].starts, num_tokens)
            path = _SampledPath(paths[parent].starts[:above], paths[parent].nodes[:above])
        segments = [(start, sample) for start, sample in own[i] if start >= num_tokens]
        if not segments or (parent >= 0 and segments[0][0] > num_tokens):
            segments.insert(0, (num_tokens, ("own", i)))
        for segment in segments:
            key = (path.nodes[-1] if path.nodes else (-1, int(group[i])), segment)
            path.starts.append(segment[0])
            path.nodes.append(numbers.setdefault(key, len(numbers)))
        paths[i] = path
        in_tree[int(group[i])].append(i)

    for i in members.tolist():
        if i not in recorded.parents:
            place(i)
    waiting = dict(recorded.parents)
    while waiting:
        # Continuations of one prefix, by group, node and number of tokens: they are children of one place.
        ready: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for i, (parent, num_tokens) in waiting.items():
            if parent in paths:
                ready[int(group[i]), paths[parent].above(num_tokens), num_tokens].append(i)
        if not ready:
            i = min(waiting)
            raise TreepackError(
                f"{trie.source(i)}: continues rollouts that continue it; name the rollout that it was cut from"
            )
        for (code, node, num_tokens), new in ready.items():
            old = [i for i in in_tree[code] if paths[i].above(num_tokens) == node]
            for i in new:
                place(i)
                del waiting[i]
            child = {i: paths[i].child(num_tokens) for i in [*old, *new]}
            for values, shares in zip(weights, recorded.weights, strict=True):
                _divide(values, shares, child, old=old, new=new)


def _divide(values: Float64, shares: Float64, child: dict[int, int], *, old: list[int], new: list[int]) -> None:
    """Divide the weight of the leaves `old` below a place among its old and new children, in place.

    `values` and `shares` float64 [n] are the weights so far and the recorded ones, `child` the child of the place that
    contains each leaf. Every child with any weight gets the same. Old leaves keep their shares of a child, and new
    leaves have the recorded ones, or equal ones.
    """
    # values [1/4, 1/4 | -, -], children [0, 1 | 2, 3] -> [1/8, 1/8 | 1/8, 1/8]
    total = sum(values[i] for i in old)
    num_old = len({child[i] for i in old if values[i] > 0})
    below: dict[int, list[int]] = defaultdict(list)
    for i in new:
        below[child[i]].append(i)
    parts = []
    for leaves in below.values():
        part = np.array([shares[i] for i in leaves])
        parts.append((leaves, np.ones(len(leaves)) if np.isnan(part).any() else part))
    parts = [(leaves, part) for leaves, part in parts if part.sum() > 0]
    if total == 0 or not parts:
        return
    num_children = num_old + len(parts)
    for i in old:
        values[i] *= num_old / num_children
    for leaves, part in parts:
        values[leaves] = total / num_children * part / part.sum()


def _check_parents(trie: Trie, group: Int64, recorded: _RecordedWeights) -> None:
    own = np.array(list(recorded.parents))
    parent, num_tokens = np.array(list(recorded.parents.values())).T
    remedies = {
        "is in another group or step": "give the continuation its group_id and step",
        "has fewer or other tokens": "record the number of tokens that the prompt repeats",
    }
    differs = num_tokens > trie.lengths[parent]
    if trie.share != "none":  # without sharing, equal tokens have two places
        paths, last = node_paths(trie), np.minimum(num_tokens, trie.lengths[parent]) - 1
        differs |= token_places(trie, paths, own, last) != token_places(trie, paths, parent, last)
    for is_wrong, (fault, remedy) in zip((group[own] != group[parent], differs), remedies.items(), strict=True):
        for at in np.flatnonzero(is_wrong)[:1].tolist():
            name = trie.trajectories["trajectory_id"][int(parent[at])].as_py()
            raise TreepackError(
                f"{trie.source(own[at])}: continues {num_tokens[at]} tokens of the rollout {name!r}, which {fault}; "
                f"{remedy}"
            )


def _own_segments(trie: Trie, members: Int64) -> list[list[tuple[int, Any]]]:
    """Return the first token and the identity of each recorded segment of the `members`.

    Two rollouts have a segment in common if they have the segments before it in common, and its identity is equal: its
    id, and the place of its last token in the trie. The last segment of a rollout is never shared. Without recorded
    segments, it starts at the first trained token.
    """
    segments, first = recorded_segments(trie, members), first_trained(trie, members).tolist()
    listed = [[start] if each is None else each.starts for each, start in zip(segments, first, strict=True)]
    # starts [3, 7] -> the segment 3 .. 6 ends at token 6; the last segment has no end that others could share.
    owner = np.repeat(members, [len(starts) - 1 for starts in listed])
    final = np.array([end - 1 for starts in listed for end in starts[1:]], np.int64)
    places = iter(token_places(trie, node_paths(trie), owner, final).tolist())
    result: list[list[tuple[int, Any]]] = []
    for i, each, starts in zip(members.tolist(), segments, listed, strict=True):
        ids = each.ids if each is not None and each.ids is not None else [0] * len(starts)
        inner = [(start, (number, next(places))) for start, number in zip(starts[:-1], ids, strict=False)]
        result.append([*inner, (starts[-1], ("own", i))])
    return result
