"""Reasons for every token of a trie, and the causes and the cost of lost sharing.

    Trie --added_tokens--> the tokens that each trajectory adds, and the number of them that it should have shared
         --explain_sharing--> tokens by reason, and the causes of lost sharing with an example of each

Add the trajectories to an empty trie one after another. Each adds the tokens that no earlier one has, so the added
tokens sum up to N_tree. The order is by group, rollout and call, so the trajectory that another one should continue
comes before it:

    first call of the group's first rollout    adds all its tokens
    first call of a later rollout              should share its prompt with that first rollout
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import polars as pl
from numpy.typing import NDArray

from treepack.analysis.text_differences import TextDifference, classify_difference
from treepack.sequences import SpanView, text_codes
from treepack.trajectory import Int64
from treepack.trie.shared_prefixes import range_minima, shared_in_order
from treepack.trie.token_ranges import ranges_of_trajectories
from treepack.trie.trie import Trie

CALL = re.compile(r"(?P<rollout>.*)/(?:turn|part)-(?P<number>\d+)(?:@.*)?", re.DOTALL)
_WHOLE_CALL = f"(?s)^{CALL.pattern}$"  # the same for polars, which matches all names at once
MAX_PARTINGS = 10_000  # partings whose text is read, the costliest ones: at 5 ms each, less than a minute
# Tokens of text before and after a parting. The context completes a word, an id or a tag that the parting cuts; the
# window is wide enough to see that the texts agree again after an id, and narrow enough to read thousands of them.
_CONTEXT, _WINDOW = 48, 160
_WINDOWS_PER_RELEASE = 1024  # each maps 64 KB of tokens and more
# Reasons for tokens that were not lost; explained in `tokens_by_reason`.
_REASONS = ("sampling", "environment", "next call", "longer prompt")
_UNREAD = {False: "prompt differs", True: "history differs"}

_Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class _AddedTokens:
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
class Divergence:
    """A place at which `trajectory` parts from the trajectory `other`, whose first `position` tokens it shares.

    Both are numbers of trajectories. `lost` tokens should have been shared. `difference` is None if no text was read.
    """

    trajectory: int
    other: int
    position: int
    lost: int
    difference: TextDifference | None


class _CauseDivergences(Sequence[Divergence]):
    """Partings of one cause, the costliest first, each made when it is needed.

    `numbers` int64 are their trajectories; the texts of the first ones have the `differences`.
    """

    def __init__(self, tokens: _AddedTokens, numbers: Int64, differences: list[TextDifference]) -> None:
        self._tokens, self._numbers, self._differences = tokens, numbers, differences

    def __len__(self) -> int:
        """Return the number of partings."""
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Divergence: ...
    @overload
    def __getitem__(self, place: slice) -> _CauseDivergences: ...
    def __getitem__(self, place: int | slice) -> Divergence | _CauseDivergences:
        """Return one parting, or several."""
        if isinstance(place, slice):
            return _CauseDivergences(self._tokens, self._numbers[place], self._differences[place])
        i = int(self._numbers[place])
        difference = self._differences[place] if place < len(self._differences) else None
        tokens = self._tokens
        return Divergence(i, int(tokens.expected[i]), int(tokens.common[i]), int(tokens.lost[i]), difference)


@dataclass(frozen=True, slots=True)
class LostCause:
    """A cause of lost sharing: its name, the lost tokens, and all partings, the costliest first."""

    name: str
    tokens: int
    partings: _CauseDivergences


def added_tokens(trie: Trie) -> _AddedTokens:
    """Return the tokens that each trajectory adds, and the number of them that it should have shared.

    O(num_nodes log num_nodes), and the time to sort the names.
    """
    expected, is_call, rank = _expectations(trie)
    start = _starts(trie, rank)
    begin, end = _trained_range(trie)
    known = expected >= 0
    # Tokens that should be shared: a prompt, and of a call at most the prompt and the answer of the call before it.
    # expected [-1, 0, 1], is_call [0, 0, 1], begin [4, 4, 8], end [7, 7, 9] -> should [0, 4, 7], as in the header
    should = np.where(known, np.minimum(begin, np.where(is_call, end[expected], begin)), 0)
    lost, common = np.zeros_like(start), np.zeros_like(start)
    later = np.flatnonzero(start < should)
    other = expected[later]
    shared = _common_tokens(trie, later, other)
    # If all of the other prompt or history is shared, this one only continues it, and nothing is lost.
    parts = shared < np.where(is_call[later], end[other], begin[other])
    lost[later[parts]] = (should - start)[later[parts]]
    common[later[parts]] = shared[parts]
    return _AddedTokens(start, lost, expected, common, is_call)


def _expectations(trie: Trie) -> tuple[Int64, NDArray[np.bool_], Int64]:
    """Return the trajectory that each one should share with, whether it is the call before, and the rank of each."""
    frame = _calls(trie).with_row_index("place").sort("step", "group", "rollout", "number", "name", "place")
    order = frame["place"].to_numpy().astype(np.int64)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    before = frame.select(pl.col("step", "group", "rollout").eq(pl.col("step", "group", "rollout").shift()))
    in_group = (before["step"] & before["group"]).fill_null(False).to_numpy()
    in_rollout = in_group & before["rollout"].fill_null(False).to_numpy()
    # The first of each group: in_group [0, 1, 1, 0, 1] -> [0, 0, 0, 3, 3].
    first = np.maximum.accumulate(np.where(in_group, 0, np.arange(len(order))))
    expected, is_call = np.full(len(order), -1), np.zeros(len(order), bool)
    expected[order] = np.where(in_rollout, np.roll(order, 1), np.where(in_group, order[first], -1))
    is_call[order] = in_rollout
    return expected, is_call, rank


def _calls(trie: Trie) -> pl.DataFrame:
    """Return step, group, rollout, number of the call and name of each trajectory."""
    table = trie.trajectories
    frame = pl.DataFrame(
        {
            "step": trie.step_rank,
            "group": pl.from_arrow(table["group_id"]),
            "name": pl.from_arrow(table["trajectory_id"]),
        }
    )
    # "task/turn-3@x" -> rollout "task", number 3; another name is a rollout with one call, number 0.
    call = frame["name"].str.extract_groups(_WHOLE_CALL).struct.unnest()
    number = call["number"].cast(pl.Int64, strict=False)
    if number.null_count() > call["number"].null_count():  # above 2^63, or other digits than ASCII ones
        values = [int(text or 0) for text in call["number"].to_list()]
        ranks = {value: i for i, value in enumerate(sorted({0, *values}))}
        number = pl.Series([ranks[value] for value in values])
    return frame.with_columns(rollout=call["rollout"].fill_null(frame["name"]), number=number.fill_null(0))


def _starts(trie: Trie, rank: Int64) -> Int64:
    """Return the first token that each trajectory adds; its length if it adds none."""
    # The trajectory of the lowest rank through a node adds its tokens. The trajectories that end in a subtree follow
    # each other: end_node [1, 2, 3] and the subtree of the nodes 1 .. 2 -> trajectories 0 and 1.
    begins = np.searchsorted(trie.end_node, np.arange(trie.num_nodes))
    lowest = range_minima(rank, begins, np.searchsorted(trie.end_node, trie.node_end))
    by_rank = np.empty(len(rank), np.int64)
    by_rank[rank] = np.arange(len(rank))  # inverse: rank [2, 0, 1] -> trajectories [1, 2, 0]
    start = trie.lengths.copy()
    np.minimum.at(start, by_rank[lowest], trie.depth)
    return start


def _trained_range(trie: Trie) -> tuple[Int64, Int64]:
    """Return first trained token of each trajectory and one past its last; its length and 0 if none is trained."""
    begin, end = trie.lengths.copy(), np.zeros(trie.num_trajectories, np.int64)
    for first, stop in ranges_of_trajectories(trie):
        spans = SpanView.of(trie.trajectories.slice(first, stop - first))
        some = np.flatnonzero(np.diff(spans.offsets))
        # offsets [0, 2, 2, 3]: trajectories 0 and 2 have spans 0-1 and 2; their first spans are 0, 2, their last 1, 2
        begin[first + some] = spans.starts[spans.offsets[some]]
        end[first + some] = spans.ends[spans.offsets[some + 1] - 1]
    return begin, end


def _common_tokens(trie: Trie, a: Int64, b: Int64) -> Int64:
    """Return the tokens that the trajectories `a` and `b` have in common, pair by pair."""
    first, last = np.minimum(a, b), np.maximum(a, b)
    common = trie.lengths[first]
    apart = np.flatnonzero(first < last)
    common[apart] = range_minima(shared_in_order(trie), first[apart] + 1, last[apart] + 1)
    return common


def explain_sharing(trie: Trie, decode: _Decode | None = None, *, most: int = MAX_PARTINGS) -> dict[str, Any]:
    """Return the reasons for all tokens of `trie` and the causes of lost sharing, as plain values ready for JSON.

    `laid_down` maps the reason why tokens are stored to their number; the sum is N_tree, see `tokens_by_reason`. `lost`
    lists the causes of lost tokens, the costliest first, each with its tokens, its number of partings and an example.

    Args:
        trie: the trie.
        decode: converts lists of token ids to texts; without it, a cause only names prompt or history.
        most: maximum number of partings whose texts are read, the costliest ones.
    """
    tokens = added_tokens(trie)
    return {
        "laid_down": tokens_by_reason(trie, tokens),
        "lost": [_as_record(cause, trie) for cause in causes_of(trie, tokens, decode, most=most)],
        "num_alone": num_alone(trie),
    }


def tokens_by_reason(trie: Trie, tokens: _AddedTokens) -> dict[str, int]:
    """Return the tokens of `trie` by the reason why they are stored; the sum is N_tree.

    The reasons are: "first" of a group; "sampling", another answer; "environment", another observation after the same
    actions; the "next call" of a rollout; a "longer prompt"; "lost", tokens that should have been shared; and "behind",
    the tokens that follow lost ones.
    """
    added = trie.lengths - tokens.start
    base = tokens.expected < 0
    reason = np.where(tokens.is_call, _REASONS.index("next call"), _reasons(trie, tokens.start))
    parts = {name: int(added[~base & (tokens.lost == 0) & (reason == i)].sum()) for i, name in enumerate(_REASONS)}
    lost = int(tokens.lost.sum())
    behind = int((added - tokens.lost)[tokens.lost > 0].sum())
    return {"first": int(added[base].sum()), **parts, "behind": behind, "lost": lost}


def _reasons(trie: Trie, start: Int64) -> NDArray[np.int8]:
    """Return the reason, an index of `_REASONS`, why each trajectory leaves the others at token `start`."""
    begin, _ = _trained_range(trie)
    reasons = np.where(start < begin, _REASONS.index("longer prompt"), _REASONS.index("environment")).astype(np.int8)
    for first, end in ranges_of_trajectories(trie):
        spans, leaves = SpanView.of(trie.trajectories.slice(first, end - first)), start[first:end]
        each = np.arange(end - first)
        owner = np.repeat(each, np.diff(spans.offsets))
        # One search for all trajectories: (owner, token) becomes the sorted key owner * reach + token.
        # reach 10, spans 2-4 and 6-8 of 0 and 3-5 of 1 -> keys [2, 6, 13]; start [7, 2] -> keys [7, 12] -> at [1, 1]
        reach = int(max(spans.ends.max(initial=0), leaves.max())) + 1
        at = np.searchsorted(owner * reach + spans.starts, each * reach + leaves, "right") - 1
        # Trajectory 0 starts in its span 1, so it sampled another token. Span 1 is not one of trajectory 1.
        some = np.flatnonzero(at >= 0)
        trained = some[(owner[at[some]] == some) & (leaves[some] < spans.ends[at[some]])]
        reasons[first + trained] = _REASONS.index("sampling")
    return reasons


def num_alone(trie: Trie) -> int:
    """Return the number of trajectories that are alone in their group, whose prompts are compared with none."""
    return int((np.bincount(text_codes(trie.trajectories["group_id"])) == 1).sum())


def causes_of(trie: Trie, tokens: _AddedTokens, decode: _Decode | None, *, most: int = MAX_PARTINGS) -> list[LostCause]:
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
    # Partings whose texts are read come first, so they are the first of their cause, too.
    of_cause: dict[str, list[TextDifference]] = {}
    numbers: dict[str, list[Int64]] = {}
    for i, difference in enumerate(differences):
        of_cause.setdefault(difference.cause, []).append(difference)
        numbers.setdefault(difference.cause, []).append(order[i : i + 1])
    unread = order[len(differences) :]
    others = {"not read": unread}
    if decode is None:
        others = {name: unread[tokens.is_call[unread] == is_call] for is_call, name in _UNREAD.items()}
    for name, rest in others.items():
        if len(rest):
            numbers.setdefault(name, []).append(rest)
    causes = []
    for name, parts in numbers.items():
        places = np.concatenate(parts)
        partings = _CauseDivergences(tokens, places, of_cause.get(name, []))
        causes.append(LostCause(name, int(tokens.lost[places].sum()), partings))
    return sorted(causes, key=lambda cause: (-cause.tokens, cause.name))


def _as_record(cause: LostCause, trie: Trie) -> dict[str, Any]:
    first, ids = cause.partings[0], trie.trajectories["trajectory_id"]
    return {
        "cause": cause.name,
        "tokens": cause.tokens,
        "num_partings": len(cause.partings),
        "example": {
            "trajectory_id": ids[first.trajectory].as_py(),
            "other": ids[first.other].as_py(),
            "position": first.position,
            **(first.difference.texts if first.difference else {}),
        },
    }


def _differences(trie: Trie, tokens: _AddedTokens, partings: list[int], decode: _Decode | None) -> list[TextDifference]:
    """Return the difference at each of `partings`, in order; none without `decode`."""
    if decode is None or not partings:
        return []
    begin, end = _trained_range(trie)
    windows: list[list[int]] = []
    whole: list[bool] = []
    for i in partings:
        other, at = int(tokens.expected[i]), int(tokens.common[i])
        # Two windows a parting: the other trajectory up to the end of the shared part, and the prompt of this one.
        for which, limit in ((other, (end if tokens.is_call[i] else begin)[other]), (i, begin[i])):
            stop = min(int(limit), at + _WINDOW)
            windows.append(path_tokens(trie, int(trie.end_node[which]), max(0, at - _CONTEXT), stop))
            whole.append(stop == limit)
        if len(windows) % _WINDOWS_PER_RELEASE == 0:
            trie.storage.release()
    texts = decode(windows)
    return [
        classify_difference(
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
