"""What training on the tree would save, before anything is trained: floating-point operations, tree against flat.

    Trie --flat_work, turns_work, whole_work--> Work     of samples one by one
    Trie --tree_work, plan_work--> Work                  of their tries, or of the rows of a plan
    packed rows --RowCounter--> Line                     rows against their trajectories one by one
    Line, ... --report--> speed-ups, hours and a verdict, ready for JSON

Flat is sequence packing without padding: every sample stands alone and sees only itself. The speed-up is the ratio of
operations (`shapes.operations`), so it is what a trainer gets that is as efficient on both; docs/forecast.md has what
this leaves out and how near measured steps come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treepack.analysis.model_cost import FlopCount, ModelShape, operations
from treepack.analysis.turns import Turns, turns_of
from treepack.columns import SpanView
from treepack.errors import TreepackError
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

if TYPE_CHECKING:
    from treepack.pack.row import Row

DEFAULT_MODEL = "qwen3-8b"
DEFAULT_DEVICE = "h200"
MEASURED_SHARE = 0.78
"""Of the vendor's dense bfloat16 rate, what an H200 does in products of 8192 x 8192 x 8192: 770 of 989 TFLOP/s."""
PEAK = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12}
"""Dense bfloat16 operations per second, as the vendor states them."""
MFU = 0.5
"""Operations of a step over those that products alone could do: 0.46 to 0.55 measured on an H200, tree and flat."""
LEAST_SHARING = 0.1
"""Share of tokens saved below which plain sequence packing is as good."""


@dataclass(frozen=True, slots=True)
class Device:
    """What trains, None if only its rate is known: floating-point operations of bfloat16 products per second."""

    name: str | None
    rate: float


def read_device(given: str) -> Device:
    """A device by its name, or by its rate in TFLOP/s.

    Raises:
        TreepackError: neither.
    """
    if given.lower() in PEAK:
        return Device(given.lower(), MEASURED_SHARE * PEAK[given.lower()])
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise TreepackError(f"device is {given!r}; expected {', '.join(PEAK)} or a rate in TFLOP/s")
    return Device(None, rate * 1e12)


@dataclass(frozen=True, slots=True)
class Line:
    """Samples one by one against their rows of `capacity` tokens, or against their tries if it is None."""

    samples: str
    capacity: int | None
    flat: FlopCount
    packed: FlopCount
    num_left_out: int = 0


def ways_to_cut(trie: Trie) -> tuple[str, ...]:
    """How rollouts can be cut into samples, "trajectories" or "turns"; that of the trajectories of `trie` first.

    If a trajectory has several turns, they are whole trajectories. Else, if one continues another, they are turns, and
    whole are those that no other one continues. Else both ways are the same, and only the first is named.
    """
    turns = turns_of(trie)
    if len(np.unique(turns.owner)) < len(turns.owner):
        return "trajectories", "turns"
    return ("trajectories",) if _is_last(trie).all() else ("turns", "trajectories")


def _is_last(trie: Trie) -> NDArray[np.bool_]:
    """Which trajectories no other one continues."""
    is_last: NDArray[np.bool_] = trie.node_end[trie.end_node] == trie.end_node + 1
    return is_last


def _pairs(lengths: Int64) -> int:
    """Score pairs of paths of these lengths, in all."""
    return int((lengths * (lengths + 1) // 2).sum())


def tree_work(trie: Trie, trained: Trained) -> FlopCount:
    """The work of `trie` without a capacity, every token computed once."""
    pairs = _pairs(trie.path_length) - _pairs(trie.depth)
    return plan_work(trained, np.zeros(trie.num_trajectories, np.int64), num_tokens=trie.tokens_tree, num_pairs=pairs)


def plan_work(trained: Trained, row_of: Int64, *, num_tokens: int, num_pairs: int) -> FlopCount:
    """The work of rows, whose tokens and score pairs are known, of the trie in which this is trained."""
    return FlopCount(num_tokens, num_pairs, int(trained.new_in_rows(row_of).sum()))


def flat_work(trie: Trie) -> FlopCount:
    """The work of the trajectories one by one."""
    return FlopCount(trie.tokens_flat, _pairs(trie.lengths), _num_trained(trie))


def turns_work(trie: Trie, turns: Turns) -> FlopCount:
    """The work of the samples of `turns` one by one, where `trie` is cut to them: each trains its own turn."""
    return FlopCount(int(turns.ends.sum()), _pairs(turns.ends), _num_trained(trie))


def whole_work(trie: Trie, trained: Trained) -> FlopCount:
    """The work, one by one, of the samples that no other one continues; they train every trained token on their path.

    A Python step for each node.
    """
    new = trained.new_in_rows(np.zeros(trie.num_trajectories, np.int64))
    on_path = np.bincount(trained.node, weights=new, minlength=trie.num_nodes).astype(np.int64)
    for node, up in enumerate(trie.parent.tolist()):
        if up >= 0:
            on_path[node] += on_path[up]
    ends = trie.end_node[_is_last(trie)]
    lengths = trie.path_length[ends]
    return FlopCount(int(lengths.sum()), _pairs(lengths), int(on_path[ends].sum()))


def _num_trained(trie: Trie) -> int:
    """Trained tokens of all trajectories but those of weight 0."""
    spans = SpanView.of(trie.trajectories)
    sizes = spans.total(spans.sizes.astype(np.float64))
    return int(sizes[trie.trajectories["weight"].to_numpy() > 0].sum())


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained spans cut at the ends of nodes: trajectory `owner` trains [start, stop) of its path, all in `node`."""

    owner: Int64
    node: Int64
    start: Int64
    stop: Int64

    def new_in_rows(self, row_of: Int64) -> Int64:
        """Tokens of each piece that no piece before it trains in the same row, where trajectory i is in `row_of[i]`.

        Their sum is how many targets the rows have: a row computes the loss of a token once for all who train it.
        """
        key = row_of[self.owner] * (int(self.node.max(initial=0)) + 1) + self.node
        order = np.lexsort([self.start, key])
        group = np.cumsum(np.diff(key[order], prepend=-1) > 0)
        base = group * (int(self.stop.max(initial=0)) + 1)  # keeps groups apart under one running maximum
        reached = np.maximum.accumulate(base + self.stop[order])
        before = np.concatenate([[0], reached[:-1]])
        new = np.zeros(len(order), np.int64)
        new[order] = np.maximum(reached - np.maximum(base + self.start[order], before), 0)
        return new


def trained_of(trie: Trie) -> Trained:
    """What the trajectories of `trie` train, but for those of weight 0. A Python step for each node where they do."""
    spans, weights = SpanView.of(trie.trajectories), trie.trajectories["weight"].to_numpy()
    num_spans = np.diff(spans.offsets)
    owners = np.flatnonzero((num_spans > 0) & (weights > 0))
    parent, depth = trie.parent.tolist(), trie.depth.tolist()
    owner, node = list[int](), list[int]()
    firsts = spans.starts[spans.offsets[owners]].tolist()
    for i, first, at in zip(owners.tolist(), firsts, trie.end_node[owners].tolist(), strict=True):
        owner.append(i)
        node.append(at)
        while depth[at] > first:
            at = parent[at]
            owner.append(i)
            node.append(at)
    nodes = np.array(node, np.int64)
    radix = int(trie.path_length.max()) + 1
    keys = np.array(owner, np.int64) * radix + trie.depth[nodes]
    order = np.argsort(keys)
    keys, nodes = keys[order], nodes[order]
    whose = np.repeat(np.arange(trie.num_trajectories), num_spans)
    kept = weights[whose] > 0
    whose, starts, ends = whose[kept], spans.starts[kept].astype(np.int64), spans.ends[kept].astype(np.int64)
    first_at = np.searchsorted(keys, whose * radix + starts, side="right") - 1
    counts = np.searchsorted(keys, whose * radix + ends - 1, side="right") - first_at
    pieces = np.arange(counts.sum()) + np.repeat(first_at - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    of = nodes[pieces]
    return Trained(
        np.repeat(whose, counts),
        of,
        np.maximum(np.repeat(starts, counts), trie.depth[of]),
        np.minimum(np.repeat(ends, counts), trie.path_length[of]),
    )


def row_work(
    position_ids: ArrayLike, scale: ArrayLike, loss_weight: ArrayLike, trajectory_ends: ArrayLike
) -> tuple[FlopCount, FlopCount]:
    """The work of a packed row, and of its trajectories one by one; the columns are those of the packed format.

    The row does not say which trajectories train a token, so all that pass through a trained one are counted.
    """
    position, trained = np.asarray(position_ids).astype(np.int64), np.asarray(loss_weight) > 0
    lengths = position[np.asarray(trajectory_ends)] + 1
    tree = FlopCount(len(position), int(position.sum()) + len(position), int(trained.sum()))
    return tree, FlopCount(int(lengths.sum()), _pairs(lengths), int(np.asarray(scale)[trained].sum(dtype=np.int64)))


class RowCounter:
    """Adds up the work of packed rows as they pass by."""

    def __init__(self) -> None:
        """Begin with none."""
        self.packed = self.flat = FlopCount(0, 0, 0)

    def over(self, rows: Iterable[Row]) -> Iterator[Row]:
        """`rows`, counted."""
        for row in rows:
            packed, flat = row_work(row.position_ids, row.scale, row.loss_weight, row.trajectory_ends)
            self.packed, self.flat = self.packed + packed, self.flat + flat
            yield row

    def line(self, manifest: dict[str, Any]) -> Line:
        """What the rows save, after all have passed; targets of single trajectories are as the manifest has them."""
        flat = replace(self.flat, targets=manifest["totals"].get("tokens_trained", self.flat.targets))
        return Line("rows", manifest["capacity"], flat, self.packed)


def report(lines: Iterable[Line], shape: ModelShape, device: Device) -> dict[str, Any]:
    """Each line with its sharing, speed-up, operations and hours on one device, and the verdict; plain values."""
    rate = device.rate * MFU
    found = []
    for line in lines:
        flat, packed = operations(shape, line.flat), operations(shape, line.packed)
        found.append(
            {
                "samples": line.samples,
                "capacity": line.capacity,
                "num_left_out": line.num_left_out,
                "tokens_flat": line.flat.tokens,
                "tokens_computed": line.packed.tokens,
                "sharing": 1 - line.packed.tokens / line.flat.tokens,
                "speedup": flat / packed,
                "flops_flat": flat,
                "flops": packed,
                "hours_flat": flat / rate / 3600,
                "hours": packed / rate / 3600,
            }
        )
    chosen = _decisive(found)
    return {
        "model": shape.name,
        "device": device.name,
        "flops_per_second": device.rate,
        "mfu": MFU,
        "lines": found,
        "pays": any(line["sharing"] >= LEAST_SHARING for line in chosen),
        "verdict": verdict(chosen),
    }


def _decisive(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each way to cut samples: of those that leave out the fewest, within a capacity if any, the fastest."""
    by_samples: dict[str, dict[str, Any]] = {}
    for line in lines:
        best = by_samples.get(line["samples"])
        if best is None or _rank(line) > _rank(best):
            by_samples[line["samples"]] = line
    return list(by_samples.values())


def _rank(line: dict[str, Any]) -> tuple[int, bool, float]:
    return -line["num_left_out"], line["capacity"] is not None, line["speedup"]


def verdict(lines: list[dict[str, Any]]) -> str:
    """One sentence on the `lines` that decide, one for each way to cut samples."""
    several = len(lines) > 1
    pays, not_pays = [], []
    for line in lines:
        name = f" for {line['samples']}" if several else ""
        if line["sharing"] >= LEAST_SHARING:
            pays.append(f"{line['speedup']:.1f}x{name}")
        else:
            not_pays.append((name, f"sharing is {100 * line['sharing']:.0f} %"))
    if not not_pays:
        return f"tree training pays: {', '.join(pays)}"
    if not pays:
        return "tree training does not pay: " + ", ".join(f"{said}{name}" for name, said in not_pays)
    refused = ", ".join(f"not{name}: {said}" for name, said in not_pays)
    return f"tree training pays: {', '.join(pays)}; {refused}"
