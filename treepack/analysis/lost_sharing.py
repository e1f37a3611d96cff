"""Reasons for every token of a trie, and the causes and the cost of lost sharing.

    Trie --added_tokens--> the tokens that each trajectory adds, and the number of them that it should have shared
         --explain-------> tokens by reason, and the causes of lost sharing with an example of each

Add the trajectories to an empty trie one after another. Each adds the tokens that no earlier one has, so the added
tokens sum up to N_tree. The order is by group, rollout and call, so the trajectory that another one should continue
comes before it:

    first call of the group's first rollout    adds all its tokens
    first call of another rollout              should share its prompt with that first rollout
    later call of a rollout                    should begin with the prompt and the answer of the call before it

    group's first     P P P P a a a
    another rollout   P P p p b b b        adds  p p b b b: p p are lost, because its prompt should have been shared
    its next call     P P p p b b b o c    adds  o c: nothing is lost

The names `<rollout>/turn-<k>` and `<rollout>/part-<k>` mark the calls of a rollout. A trajectory whose prompt continues
after the end of the other prompt has lost nothing. The cause of a loss is read from the texts on both sides of the
parting (`text_differences`), so it needs the tokenizer.
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
MAX_PARTINGS = 10_000  # partings whose text is read, the costliest ones: at 5 ms each, less than a minute
# Tokens of text before and after a parting. The context completes a word, an id or a tag that the parting cuts; the
# window is wide enough to see that the texts agree again after an id, and narrow enough to read thousands of them.
CONTEXT, WINDOW = 48, 160
UNREAD = {False: "prompt differs", True: "history differs"}

Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens that each trajectory adds to the trie of the trajectories before it; all arrays are [num_trajectories].

    Trajectory i adds its tokens from number `start` (int64) to its end. `lost` (int64) of them should have been shared
    with trajectory `expected` (int64), which is -1 for the first trajectory of a group. `common` (int64) counts the
    tokens that both have in common if something is lost, else it is 0. `is_call` (bool): the trajectory should have
    continued the call before it.
    """

    start: Int64
    lost: Int64
    expected: Int64
    common: Int64
    is_call: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Parting:
    """A place at which `trajectory` parts from the trajectory `other`, whose first `position` tokens it shares.

    Both are numbers of trajectories. `lost` tokens should have been shared. `difference` is None if no text was read.
    """

    trajectory: int
    other: int
    position: int
    lost: int
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class LostCause:
    """A cause of lost sharing: its name, the lost tokens, and all partings, the costliest first."""

    name: str
    tokens: int
    partings: list[Parting]


def added_tokens(trie: Trie) -> AddedTokens:
    """Return the tokens that each trajectory adds, and the number of them that it should have shared.

    O(num_nodes), and the time to sort the names.
    """
    expected, is_call, rank = _expectations(trie)
    start = _starts(trie, rank)
    begin, end = _trained_range(trie)
    known = expected >= 0
    # Tokens that should be shared: a prompt, and of a call at most the prompt and the answer of the call before it.
    # expected [-1, 0, 1], is_call [0, 0, 1], begin [4, 4, 8], end [7, 7, 9] -> should [0, 4, 7], as in the header
    should = np.where(known, np.minimum(begin, np.where(is_call, end[expected], begin)), 0)
    lost, common = np.zeros_like(start), np.zeros_like(start)
    parent, ends, path_length = trie.parent.tolist(), trie.end_node.tolist(), trie.path_length
    for i in np.flatnonzero(start < should).tolist():
        other = int(expected[i])
        meet = _meeting(parent, ends[i], ends[other])
        shared = 0 if meet < 0 else int(path_length[meet])
        # If all of the other prompt or history is shared, this one only continues it, and nothing is lost.
        if shared < (end if is_call[i] else begin)[other]:
            lost[i], common[i] = should[i] - start[i], shared
    return AddedTokens(start, lost, expected, common, is_call)


def _expectations(trie: Trie) -> tuple[Int64, NDArray[np.bool_], Int64]:
    """Return the trajectory that each one should share with, whether it is the call before, and the rank of each."""
    names: list[str] = trie.trajectories["trajectory_id"].to_pylist()
    groups: list[str] = trie.trajectories["group_id"].to_pylist()
    keys = []
    for name, group, step in zip(names, groups, trie.step_rank.tolist(), strict=True):
        match = CALL.fullmatch(name)  # "task/turn-3@x" -> rollout "task", number 3
        rollout, number = (match["rollout"], int(match["number"])) if match else (name, 0)
        keys.append((step, group, rollout, number, name))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    expected, is_call = np.full(len(keys), -1), np.zeros(len(keys), bool)
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.arange(len(order))
    first = before = order[0]
    for i in order[1:]:
        if keys[i][:2] != keys[first][:2]:  # another step or group
            first = i
        elif keys[i][:3] == keys[before][:3]:
            expected[i], is_call[i] = before, True
        else:
            expected[i] = first
        before = i
    return expected, is_call, rank


def _starts(trie: Trie, rank: Int64) -> Int64:
    """Return the first token that each trajectory adds; its length if it adds none."""
    parent = trie.parent.tolist()
    # The trajectory of the lowest rank through a node adds its tokens. Ranks start at the ends and move up to parents.
    lowest = np.full(trie.num_nodes, len(rank))
    np.minimum.at(lowest, trie.end_node, rank)
    first: list[int] = lowest.tolist()
    for node in range(len(parent) - 1, 0, -1):
        above = parent[node]
        if above >= 0 and first[node] < first[above]:
            first[above] = first[node]
    by_rank = np.empty(len(rank), np.int64)
    by_rank[rank] = np.arange(len(rank))  # inverse: rank [2, 0, 1] -> trajectories [1, 2, 0]
    start = trie.lengths.copy()
    np.minimum.at(start, by_rank[first], trie.depth)
    return start


def _trained_range(trie: Trie) -> tuple[Int64, Int64]:
    """Return first trained token of each trajectory and one past its last; its length and 0 if none is trained."""
    spans = SpanView.of(trie.trajectories)
    begin, end = trie.lengths.copy(), np.zeros(trie.num_trajectories, np.int64)
    some = np.flatnonzero(np.diff(spans.offsets))
    # offsets [0, 2, 2, 3]: trajectories 0 and 2 have spans 0-1 and 2; their first spans are 0, 2, their last 1, 2
    begin[some] = spans.starts[spans.offsets[some]]
    end[some] = spans.ends[spans.offsets[some + 1] - 1]
    return begin, end


def _meeting(parent: list[int], a: int, b: int) -> int:
    """Return the last node that the paths to `a` and `b` share, -1 if they share none."""
    # Parents come before their children, so the node with the larger index is never above the other one.
    while a != b:
        a, b = (parent[a], b) if a > b else (a, parent[b])
    return a


def explain(trie: Trie, decode: Decode | None = None, *, most: int = MAX_PARTINGS) -> dict[str, Any]:
    """Return the reasons for all tokens of `trie` and the causes of lost sharing, as plain values ready for JSON.

    `laid_down` maps the reason why tokens are stored to their number; the sum is N_tree, see `tokens_by_reason`. `lost`
    lists the causes of lost tokens, the costliest first, each with its tokens, its number of partings and an example.

    Args:
        trie: the trie.
        decode: converts lists of token ids to texts; without it, a cause only names prompt or history.
        most: maximum number of partings whose texts are read, the costliest ones.
    """
    tokens = added_tokens(trie)
    ids: list[str] = trie.trajectories["trajectory_id"].to_pylist()
    return {
        "laid_down": tokens_by_reason(trie, tokens),
        "lost": [_as_record(cause, ids) for cause in causes_of(trie, tokens, decode, most=most)],
        "num_alone": num_alone(trie),
    }


def tokens_by_reason(trie: Trie, tokens: AddedTokens) -> dict[str, int]:
    """Return the tokens of `trie` by the reason why they are stored; the sum is N_tree.

    The reasons are: "first" of a group; "sampling", another answer; "environment", another observation after the same
    actions; the "next call" of a rollout; a "longer prompt"; "lost", tokens that should have been shared; and "behind",
    the tokens that follow lost ones.
    """
    added = trie.lengths - tokens.start
    base = tokens.expected < 0
    reason = np.where(tokens.is_call, "next call", _reasons(trie, tokens.start))
    parts = {
        name: int(added[~base & (tokens.lost == 0) & (reason == name)].sum())
        for name in ("sampling", "environment", "next call", "longer prompt")
    }
    lost = int(tokens.lost.sum())
    behind = int((added - tokens.lost)[tokens.lost > 0].sum())
    return {"first": int(added[base].sum()), **parts, "behind": behind, "lost": lost}


def _reasons(trie: Trie, start: Int64) -> NDArray[np.str_]:
    """Return the reason why each trajectory leaves the others at token `start`: the kind of that token."""
    spans = SpanView.of(trie.trajectories)
    begin, _ = _trained_range(trie)
    owner = np.repeat(np.arange(trie.num_trajectories), np.diff(spans.offsets))
    # One search for all trajectories: (owner, token) becomes the sorted key owner * reach + token.
    # reach 10, spans 2-4 and 6-8 of 0 and 3-5 of 1 -> keys [2, 6, 13]; start [7, 2] -> keys [7, 12] -> at [1, 1]
    reach = int(trie.lengths.max()) + 1
    at = np.searchsorted(owner * reach + spans.starts, np.arange(trie.num_trajectories) * reach + start, "right") - 1
    # Trajectory 0 starts in its span 1, so it sampled another token. Span 1 is not one of trajectory 1: no span there.
    trained = (at >= 0) & (owner[at] == np.arange(trie.num_trajectories)) & (start < spans.ends[at])
    return np.where(trained, "sampling", np.where(start < begin, "longer prompt", "environment"))


def num_alone(trie: Trie) -> int:
    """Return the number of trajectories that are alone in their group, whose prompts are compared with none."""
    groups = np.array(trie.trajectories["group_id"].to_pylist())
    _, code, count = np.unique(groups, return_inverse=True, return_counts=True)
    return int((count[code] == 1).sum())


def causes_of(trie: Trie, tokens: AddedTokens, decode: Decode | None, *, most: int = MAX_PARTINGS) -> list[LostCause]:
    """Return the causes of lost sharing, the costliest first.

    Args:
        trie: the trie.
        tokens: its `added_tokens`.
        decode: converts lists of token ids to texts; without it, a cause only names prompt or history.
        most: maximum number of partings whose texts are read, the costliest ones.
    """
    order = np.flatnonzero(tokens.lost)
    order = order[np.argsort(-tokens.lost[order], kind="stable")]
    differences = _differences(trie, tokens, order[:most].tolist(), decode)
    partings: dict[str, list[Parting]] = {}
    for place, i in enumerate(order.tolist()):
        difference = differences[place] if place < len(differences) else None
        cause = UNREAD[bool(tokens.is_call[i])] if decode is None else "not read"
        parting = Parting(i, int(tokens.expected[i]), int(tokens.common[i]), int(tokens.lost[i]), difference)
        partings.setdefault(difference.cause if difference else cause, []).append(parting)
    causes = [LostCause(name, sum(one.lost for one in places), places) for name, places in partings.items()]
    return sorted(causes, key=lambda cause: (-cause.tokens, cause.name))


def _as_record(cause: LostCause, ids: list[str]) -> dict[str, Any]:
    first = cause.partings[0]
    return {
        "cause": cause.name,
        "tokens": cause.tokens,
        "num_partings": len(cause.partings),
        "example": {
            "trajectory_id": ids[first.trajectory],
            "other": ids[first.other],
            "position": first.position,
            **(first.difference.texts if first.difference else {}),
        },
    }


def _differences(trie: Trie, tokens: AddedTokens, partings: list[int], decode: Decode | None) -> list[Difference]:
    """Return the difference at each of `partings`, in order; none without `decode`."""
    if decode is None or not partings:
        return []
    begin, end = _trained_range(trie)
    windows: list[list[int]] = []
    whole: list[bool] = []
    for i in partings:
        other, at = int(tokens.expected[i]), int(tokens.common[i])
        # Two windows a parting: the other trajectory up to where it should be shared, and the prompt of this one.
        for which, limit in ((other, (end if tokens.is_call[i] else begin)[other]), (i, begin[i])):
            stop = min(int(limit), at + WINDOW)
            windows.append(path_tokens(trie, int(trie.end_node[which]), max(0, at - CONTEXT), stop))
            whole.append(stop == limit)
    texts = decode(windows)
    return [
        classify(
            texts[2 * k],
            texts[2 * k + 1],
            is_call=bool(tokens.is_call[i]),
            whole=(whole[2 * k], whole[2 * k + 1]),
        )
        for k, i in enumerate(partings)
    ]


def path_tokens(trie: Trie, node: int, start: int, stop: int) -> list[int]:
    """Return the tokens [start, stop) of the path that ends with `node`."""
    parts: list[list[int]] = []
    while node >= 0:
        first, depth = int(trie.node_start[node]), int(trie.depth[node])
        length = int(trie.node_start[node + 1]) - first
        # A node with tokens 5-8 of the path, start 6, stop 20 -> tokens 1-3 of the node
        a, b = max(start - depth, 0), min(stop - depth, length)
        if a < b:
            parts.append(trie.tokens[first + a : first + b].tolist())
        if depth <= start:
            break
        node = int(trie.parent[node])
    return [token for part in reversed(parts) for token in part]
