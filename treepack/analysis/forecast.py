"""Forecast of the savings of training on the tree: floating-point operations, tree against flat, before any training.

    Trie --flat_work, turns_work, whole_work--> FlopCount     of samples one by one
    Conversations --_append_only_work--> FlopCount             of one append-only sequence per rollout
    Trie --tree_work, plan_work--> FlopCount                  of their tries, or of the rows of a plan
    packed rows --RowCounter--> ForecastLine                  rows against their trajectories one by one
    ForecastLine, ... --forecast_report--> speed-ups, hours and a verdict, ready for JSON

Flat is sequence packing without padding: every sequence is separate and sees only itself. Several baselines differ in
the sequences: each sample of the trie, one append-only sequence per conversation, or one sample per turn. The speed-up
is the ratio of operations (`model_cost.operations`), so it holds for a trainer that is equally efficient on both.
docs/forecast.md lists the costs left out and compares the forecast with measured steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treepack.analysis.turns import SortedTurns, turns_of
from treepack.costs.model_cost import FlopCount
from treepack.errors import TreepackError
from treepack.ingest.conversation_counts import Conversations, conversations_of_manifest
from treepack.sequences import SpanView
from treepack.trajectory import Int64
from treepack.trie.token_ranges import ranges
from treepack.trie.trie import Trie

if TYPE_CHECKING:
    from treepack.pack.row import Row

DEFAULT_MODEL = "qwen3-8b"
DEFAULT_DEVICE = "h200"
# Measured over nominal bfloat16 rate: products of 8192 x 8192 x 8192 run at 770 of 989 TFLOP/s on an H200.
_MEASURED_SHARE = 0.78
# Dense bfloat16 operations per second in the vendor's data sheets.
_PEAK = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "l40s": 362e12,
    "rtx4090": 165e12,
    "rtx5090": 209e12,
}
# Memory that the drivers of these devices report, in GiB, rounded down.
_MEMORY = {"a100": 79, "h100": 79, "h200": 139, "b200": 178, "l40s": 44, "rtx4090": 23, "rtx5090": 31}
# Operations per second of a training step over the rate of products alone: 0.46 to 0.55 on an H200, tree and flat.
MFU = 0.5
# Maximum share of conversations without an append-only sequence; above it, the forecast has no such baseline.
MAX_ABSENT = 0.05
# Trajectories whose trained tokens are counted at a time, with the rest of their tree: 10 MB, and 100 MB for 20 spans.
TRAJECTORIES_AT_ONCE = 1 << 15
# Keys of `glossary.BASELINES`.
APPEND_ONLY, SAMPLES, TRAJECTORIES, TURNS = "append_only", "samples", "trajectories", "turns"


@dataclass(frozen=True, slots=True)
class TrainingDevice:
    """A training device.

    Attributes:
        name: its name, None if only the rate is known.
        rate: bfloat16 operations of products per second.
        memory: its bytes, None if they are not known.
    """

    name: str | None
    rate: float
    memory: int | None = None


def read_device(text: str) -> TrainingDevice:
    """Return a device by its name, or by its rate in TFLOP/s.

    Raises:
        TreepackError: the text is neither a known name nor a positive rate.
    """
    if text.lower() in _PEAK:
        return TrainingDevice(text.lower(), _MEASURED_SHARE * _PEAK[text.lower()], _MEMORY[text.lower()] << 30)
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise TreepackError(f"device is {text!r}; expected {', '.join(_PEAK)} or a rate in TFLOP/s")
    return TrainingDevice(None, rate * 1e12)


@dataclass(frozen=True, slots=True)
class ForecastLine:
    """Work of a baseline one by one, and of rows of `capacity` tokens, or of tries if `capacity` is None.

    `samples` names the sequences of the baseline: "trajectories", "turns", "append_only" or "rows". `baseline` is a key
    of `glossary.BASELINES`.
    """

    samples: str
    capacity: int | None
    flat: FlopCount
    packed: FlopCount
    num_left_out: int = 0
    baseline: str = SAMPLES


@dataclass(frozen=True, slots=True)
class ForecastRows:
    """Rows of `capacity` tokens whose memory is forecast.

    Attributes:
        capacity: maximum number of tokens of a row.
        work: the work of the rows.
        num_rows: number of rows.
        row_tokens: tokens of the largest row.
        longest: tokens of the longest trajectory.
        num_left_out: trajectories that are longer than a row.
    """

    capacity: int
    work: FlopCount
    num_rows: int
    row_tokens: int
    longest: int
    num_left_out: int = 0


def ways_to_cut(trie: Trie) -> tuple[str, ...]:
    """Return the ways to cut rollouts into samples, "trajectories" and "turns"; the way of `trie` comes first.

    If a trajectory has several turns, the trie has whole trajectories. Else, if a trajectory continues another one, it
    has turns, and the whole trajectories are the ones that no other one continues. Else both ways give the same
    samples, and only "trajectories" is returned.
    """
    owner = turns_of(trie).owner
    if (owner[1:] == owner[:-1]).any():
        return "trajectories", "turns"
    return ("trajectories",) if _is_last(trie).all() else ("turns", "trajectories")


def _is_last(trie: Trie) -> NDArray[np.bool_]:
    """Return a mask of the trajectories that no other one continues."""
    # A node without children is a subtree of one node: node_end[u] == u + 1
    is_last: NDArray[np.bool_] = trie.node_end[trie.end_node] == trie.end_node + 1
    return is_last


def _pairs(lengths: Int64) -> int:
    """Return the total number of score pairs of paths of these lengths."""
    # Token i sees i + 1 tokens: a path of 3 has 1 + 2 + 3 = 6 pairs
    return int((lengths * (lengths + 1) // 2).sum())


def tree_work(trie: Trie) -> FlopCount:
    """Return the work of `trie` without a capacity: every token is computed once."""
    # The tokens of a node at depths d .. e - 1 see d + 1 .. e tokens, so their pairs are pairs(e) - pairs(d).
    pairs = _pairs(trie.path_length) - _pairs(trie.depth)
    return plan_work(trie, np.zeros(trie.num_trajectories, np.int64), num_tokens=trie.tokens_tree, num_pairs=pairs)


def plan_work(trie: Trie, row_of: Int64, *, num_tokens: int, num_pairs: int) -> FlopCount:
    """Return the work of rows with known numbers of tokens and score pairs; trajectory i is in row `row_of[i]`."""
    # A trained token is one target in each row.
    return FlopCount(num_tokens, num_pairs, sum(int(part.new_in_rows(row_of).sum()) for part in _trained_parts(trie)))


def flat_work(trie: Trie) -> FlopCount:
    """Return the work of the trajectories one by one."""
    return FlopCount(trie.tokens_flat, _pairs(trie.lengths), int(_num_trained(trie).sum()))


def once_work(trie: Trie) -> FlopCount:
    """Return the work of a trie of turns one by one; a turn that several paths of a record have counts once."""
    turns = turns_of(trie)
    repeated = np.setdiff1d(turns.owner, turns.distinct(trie).owner)
    members = np.delete(np.arange(trie.num_trajectories), repeated)
    lengths = trie.lengths[members]
    return FlopCount(int(lengths.sum()), _pairs(lengths), int(_num_trained(trie)[members].sum()))


def turns_work(trie: Trie, turns: SortedTurns) -> FlopCount:
    """Return the work of the samples of `turns` of `trie` one by one; each sample trains one turn."""
    is_weighted = trie.trajectories["weight"].to_numpy()[turns.owner] > 0
    targets = (turns.ends - turns.starts)[is_weighted].sum()
    return FlopCount(int(turns.ends.sum()), _pairs(turns.ends), int(targets))


def _append_only_work(conversations: Conversations) -> FlopCount:
    """Return the work of one append-only sequence per rollout, one by one."""
    sums = conversations.append_only
    return FlopCount(sums.tokens, sums.pairs, sums.targets)


def whole_work(trie: Trie) -> FlopCount:
    """Return the work, one by one, of the samples that no other one continues.

    They train every trained token on their path.
    """
    # Trained tokens of each node: in one row, every token counts once.
    new = np.zeros(trie.num_nodes, np.int64)
    for part in _trained_parts(trie):
        np.add.at(new, part.node, part.new_in_rows(np.zeros(trie.num_trajectories, np.int64)))
    # Nodes up to each one, without nodes whose subtree ended before it, are its path. New tokens [3, 1, 2] of a root
    # and its children: [3, 4, 6] up to each; node 1 ends before node 2 -> [3, 4, 5].
    ended = np.bincount(trie.node_end, weights=new, minlength=trie.num_nodes + 1).astype(np.int64)
    on_path = np.cumsum(new) - np.cumsum(ended)[:-1]
    ends = trie.end_node[_is_last(trie)]
    lengths = trie.path_length[ends]
    return FlopCount(int(lengths.sum()), _pairs(lengths), int(on_path[ends].sum()))


def _num_trained(trie: Trie) -> Int64:
    """Return the trained tokens of each trajectory, 0 if its weight is 0; int64 [num_trajectories]."""
    spans = SpanView.of(trie.trajectories)
    sizes = spans.total(spans.sizes.astype(np.float64))
    return np.where(trie.trajectories["weight"].to_numpy() > 0, sizes, 0).astype(np.int64)


def _trained_parts(trie: Trie) -> Iterator[_TrainedPieces]:
    """Yield the trained pieces of whole trees, about `TRAJECTORIES_AT_ONCE` trajectories at a time to bound memory."""
    # Trajectories before each tree: roots [0, 3], ends [1, 2, 4] -> [0, 2, 3].
    begins = np.append(np.searchsorted(trie.end_node, np.flatnonzero(trie.parent < 0)), trie.num_trajectories)
    for first, end in ranges(begins, TRAJECTORIES_AT_ONCE):
        yield _pieces(trie, int(begins[first]), int(begins[end]))
        trie.storage.release()


@dataclass(frozen=True, slots=True)
class _TrainedPieces:
    """Trained spans cut into pieces at the ends of nodes: `owner` trains [start, stop) of its path, all in `node`."""

    owner: Int64
    node: Int64
    start: Int64
    stop: Int64

    def new_in_rows(self, row_of: Int64) -> Int64:
        """Return the number of tokens of each piece that no earlier piece in the same row trains.

        Trajectory i is in row `row_of[i]`. The sum is the number of targets of the rows, because a row computes the
        loss of a token once for all trajectories that train it.
        """
        # One row, one node, pieces [0, 4), [2, 6), [3, 5): running maximum of stops [4, 6, 6], before [0, 4, 6]
        # -> new tokens [4, 2, 0]: the union of the pieces has 6 tokens.
        key = row_of[self.owner] * (int(self.node.max(initial=0)) + 1) + self.node
        order = np.lexsort([self.start, key])
        group = np.cumsum(np.diff(key[order], prepend=-1) > 0)
        base = group * (int(self.stop.max(initial=0)) + 1)  # separates the groups under one running maximum
        reached = np.maximum.accumulate(base + self.stop[order])
        before = np.concatenate([[0], reached[:-1]])
        new = np.zeros(len(order), np.int64)
        new[order] = np.maximum(reached - np.maximum(base + self.start[order], before), 0)
        return new


def _pieces(trie: Trie, first: int, end: int) -> _TrainedPieces:
    """Return the trained pieces of the trajectories [first, end) of positive weight."""
    table = trie.trajectories.slice(first, end - first)
    spans, weights = SpanView.of(table), table["weight"].to_numpy()
    num_spans = np.diff(spans.offsets)
    owners = np.flatnonzero((num_spans > 0) & (weights > 0))
    # The nodes of each path, from its end up to the one that contains its first trained token: one step up for all
    # paths at a time. Paths of 2, 1 and 2 nodes -> owners [0, 1, 2], then [0, 2].
    owner, node = [owners], [trie.end_node[first:end][owners].astype(np.int64)]
    from_token = spans.starts[spans.offsets[owners]]
    while (is_longer := trie.depth[node[-1]] > from_token).any():
        from_token = from_token[is_longer]
        owner.append(owner[-1][is_longer])
        node.append(trie.parent[node[-1][is_longer]].astype(np.int64))
    # (trajectory, depth of node) as one sorted key, so that one search finds the nodes of all spans.
    # radix 100, path of trajectory 2 with nodes at depths 0, 10, 30 -> keys 200, 210, 230; its span 12-35 begins at key
    # 210 (search of 212) and ends at key 230 (search of 234): two pieces, 12-30 and 30-35.
    nodes = np.concatenate(node)
    radix = int(_path_lengths(trie, nodes).max(initial=0)) + 1
    keys = np.concatenate(owner) * radix + trie.depth[nodes]
    order = np.argsort(keys)
    keys, nodes = keys[order], nodes[order]
    whose = np.repeat(np.arange(end - first), num_spans)
    kept = weights[whose] > 0
    whose, starts, ends = whose[kept], spans.starts[kept].astype(np.int64), spans.ends[kept].astype(np.int64)
    first_at = np.searchsorted(keys, whose * radix + starts, side="right") - 1
    counts = np.searchsorted(keys, whose * radix + ends - 1, side="right") - first_at
    pieces = np.arange(counts.sum()) + np.repeat(first_at - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    # pieces: indices of nodes for all spans, first_at [4, 9], counts [2, 3] -> [4, 5, 9, 10, 11]
    node_of = nodes[pieces]
    return _TrainedPieces(
        first + np.repeat(whose, counts),
        node_of,
        np.maximum(np.repeat(starts, counts), trie.depth[node_of]),
        np.minimum(np.repeat(ends, counts), _path_lengths(trie, node_of)),
    )


def _path_lengths(trie: Trie, nodes: Int64) -> Int64:
    """Return the tokens from the root to the end of each of `nodes`; `Trie.path_length` does this for all nodes."""
    return trie.depth[nodes] + trie.node_start[nodes + 1] - trie.node_start[nodes]


def row_work(
    position_ids: ArrayLike, scale: ArrayLike, loss_weight: ArrayLike, trajectory_ends: ArrayLike
) -> tuple[FlopCount, FlopCount]:
    """Return the work of a packed row, and of its trajectories one by one; the arguments are columns of the row.

    No column contains the trajectories that train a token, so every trajectory through a trained token counts.
    """
    position, trained = np.asarray(position_ids).astype(np.int64), np.asarray(loss_weight) > 0
    lengths = position[np.asarray(trajectory_ends)] + 1
    # A token at position p sees p + 1 tokens in the row, too, because a row contains whole paths.
    tree = FlopCount(len(position), int(position.sum()) + len(position), int(trained.sum()))
    return tree, FlopCount(int(lengths.sum()), _pairs(lengths), int(np.asarray(scale)[trained].sum(dtype=np.int64)))


class RowCounter:
    """Sums of the work of packed rows, counted while they are read."""

    def __init__(self) -> None:
        """Start from zero."""
        self.packed = self.flat = FlopCount(0, 0, 0)
        self.num_rows = self.row_tokens = self.longest = 0

    def over(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield `rows` unchanged, and count each."""
        for row in rows:
            packed, flat = row_work(row.position_ids, row.scale, row.loss_weight, row.trajectory_ends)
            self.packed, self.flat = self.packed + packed, self.flat + flat
            self.num_rows += 1
            self.row_tokens = max(self.row_tokens, row.num_tokens)
            self.longest = max(self.longest, int(row.position_ids.max(initial=-1)) + 1)
            yield row

    def rows(self, capacity: int) -> ForecastRows:
        """Return the rows read, which have `capacity` tokens at most."""
        return ForecastRows(capacity, self.packed, self.num_rows, self.row_tokens, self.longest)

    def line(self, capacity: int, totals: Mapping[str, Any]) -> ForecastLine:
        """Return the savings of all rows read; the targets of single trajectories come from the manifest."""
        flat = replace(self.flat, targets=totals.get("tokens_trained", self.flat.targets))
        return ForecastLine("rows", capacity, flat, self.packed)

    def lines(self, manifest: Mapping[str, Any]) -> list[ForecastLine]:
        """Return the savings of all rows read against each baseline in `manifest`."""
        line = self.line(manifest["capacity"], manifest["totals"])
        conversations = usable_conversations(conversations_of_manifest(manifest), manifest["totals"])
        return [line] if conversations is None else [line, append_only_line(line, conversations)]


def append_only_line(line: ForecastLine, conversations: Conversations) -> ForecastLine:
    """Return `line` against one append-only sequence per rollout."""
    return replace(line, samples=APPEND_ONLY, flat=_append_only_work(conversations), baseline=APPEND_ONLY)


def usable_conversations(conversations: Conversations | None, totals: Mapping[str, Any]) -> Conversations | None:
    """Return `conversations` if their samples have these `totals`, and if they have append-only sequences."""
    if conversations is None or not conversations.describes(totals):
        return None
    sums = conversations.append_only
    is_known = sums.tokens > 0 and sums.num_absent <= MAX_ABSENT * conversations.num_conversations
    return conversations if is_known else None
