"""The lines of one node: its place, how much it holds, its tokens, and the trajectories that end in it.

    0  * 3 tokens x3, 2 trained, loss weight 6     the header
       | 7 [8 9]*3                                 the body
       | = a  reward 1                             an ending

What stands before the lines, which makes a tree of them, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from treepack.analysis.show.bodies import Look, Segment, ids_rows, segment_ids, segment_text, segments
from treepack.analysis.show.figures import counted, number, spread
from treepack.analysis.show.forest import DrawnForest, trained_runs
from treepack.analysis.show.wrapping import Line, StyledText, TextRow, printable, width_of
from treepack.trajectory import Int64

NODES = 100
ENDINGS = 4  # trajectories that are named at one node
MIN_BODY = 24


def _width(line: Line) -> int:
    return sum(width_of(span.text) for span in line)


class Nodes:
    """The lines of single nodes of one forest."""

    def __init__(
        self, forest: DrawnForest, look: Look, places: Int64, *, by_turn: bool = False, intervals: bool = False
    ) -> None:
        """Number the first token of node u `places[u]`, and choose the nodes to draw."""
        self.forest, self.look, self.places, self.by_turn, self.intervals = forest, look, places, by_turn, intervals
        digits = len(str(int((places + forest.size).max())))
        self.gutter = 2 * digits + 4 if intervals else digits
        self.subtree = forest.subtree_tokens
        self.shown = np.ones(forest.num_nodes, bool)
        if not look.full and not by_turn and forest.num_nodes > NODES:
            self.shown[np.argsort(-self.subtree, kind="stable")[NODES:]] = False
        trained = forest.loss_weight != 0
        self.begins_turn = trained & ~np.concatenate([[False], trained[:-1]])
        self.turn = np.cumsum(self.begins_turn)

    def line(self, place: int | str | None, prefix: str, *spans: StyledText) -> Line:
        """A line with its place in the gutter."""
        gutter = "" if place is None else str(place)
        return (StyledText(f"{gutter:>{self.gutter}}  {prefix}", "faint"), *spans)

    def room(self, prefix: str) -> int:
        """Columns right of the gutter and `prefix`."""
        return max(MIN_BODY, self.look.width - self.gutter - 2 - len(prefix))

    def node(self, node: int, first: str, below: str, *, notes: Iterable[str] = ()) -> Iterator[Line]:
        """All lines of a node: `first` stands before its first line, `below` before the others."""
        endings = self._endings(node)
        *header, last = self.header(node, first, below, notes)
        if len(endings) == 1 and _width(last) + 2 + width_of(endings[0]) <= self.look.width:
            last = (*last, StyledText("  " + endings[0], "name"))
            endings = []
        yield from (*header, last)
        yield from self.body(node, below)
        for ending in endings:
            yield self.line(None, below, StyledText(ending, "name"))

    def header(self, node: int, first: str, below: str, notes: Iterable[str] = ()) -> list[Line]:
        """How many tokens there are, shared by how many, how many are trained and with which weight; and `notes`."""
        forest = self.forest
        begin, stop = forest.start[node : node + 2].tolist()
        weight = forest.loss_weight[begin:stop]
        num_trained = int((weight != 0).sum())
        passing = int(forest.num_passing[node])
        parts = [StyledText(f"* {counted(stop - begin, 'token')}" + (f" x{passing:,}" if passing > 1 else ""))]
        if num_trained and not self.by_turn:
            turns, total = trained_runs(weight), float(weight.sum())
            parts.append(
                StyledText(f"{num_trained:,} trained" + (f" in {turns:,} turns" if turns > 1 else ""), "", True)
            )
            if abs(total - num_trained) > 1e-9 * num_trained:
                parts.append(StyledText(f"loss weight {number(total)}", "", trained=True))
        place: int | str = int(self.places[node])
        if self.intervals:
            place = f"[{place}, {forest.start[forest.node_end[node]]})"
        lines = [self.line(place, first, parts[0])]
        for part in [*parts[1:], *(StyledText(note, "faint") for note in notes)]:
            if _width(lines[-1]) + 2 + width_of(part.text) <= self.look.width:
                lines[-1] = (*lines[-1], StyledText(", "), part)
            else:
                lines.append(self.line(None, below, part))
        return lines

    def body(self, node: int, prefix: str) -> Iterator[Line]:
        """The tokens of a node."""
        forest, look, width = self.forest, self.look, self.room(prefix)
        if look.decoder is None and not self.by_turn:
            for row in ids_rows(forest, node, look, width):
                yield self.line(None, prefix, *row.spans)
            return
        for segment in segments(forest, node):
            if label := self._label(segment, forest.start[node] == segment.first):
                yield self.line(None, prefix, StyledText("+ ", "", trained=True), StyledText(f"({label})", "faint"))
            if look.decoder is None:
                rows = segment_ids(forest, segment, look, width)
            else:
                rows = segment_text(forest, node, segment, look, width)
            yield from (self._placed(node, row, prefix) for row in rows)

    def _placed(self, node: int, row: TextRow, prefix: str) -> Line:
        place = None if row.place is None else int(self.places[node]) + row.place - int(self.forest.start[node])
        return self.line(place, prefix, *row.spans)

    def _label(self, segment: Segment, begins_node: bool) -> str:
        """What is said above a trained segment: a turn where it begins, a weight that changes or is not 1."""
        first, forest = segment.first, self.forest
        if not segment.trained:
            return ""
        parts = []
        if self.by_turn and self.begins_turn[first]:
            stop = first + int((forest.loss_weight[first:] == 0).argmax() or len(forest.loss_weight) - first)
            parts = [f"turn {self.turn[first]}: {counted(stop - first, 'token')}"]
            for name, values in forest.values.items():
                known = values[first:stop][~np.isnan(values[first:stop])]
                parts += [f"mean {name} {number(float(known.mean()))}"] if len(known) else []
        above = 0.0 if first == 0 or (begins_node and not self.by_turn) else float(forest.loss_weight[first - 1])
        if segment.low != segment.high:
            parts.append(f"loss weights {number(segment.low)} to {number(segment.high)}")
        elif segment.low not in (1, above) or above not in (0, segment.low):
            parts.append(f"loss weight {number(segment.low)}")
        return ", ".join(parts)

    def _endings(self, node: int) -> list[str]:
        """A line for each trajectory that ends in `node`, the last of many for all that are not named.

        An id is never shortened, for it is what one would copy to ask for more.
        """
        ending = self.forest.endings
        indices = list(ending.within(node, node + 1))
        named = indices if self.look.full or len(indices) <= ENDINGS else indices[: ENDINGS - 1]
        found = []
        for i in named:
            found.append("  ".join(["= " + printable(ending.trajectory_ids[i]), *self._figures([i])]))
        if rest := indices[len(named) :]:
            found.append("  ".join([f"= {len(rest):,} more", *self._figures(rest)]))
        return found

    def _figures(self, indices: list[int]) -> list[str]:
        """What is known of the rewards and advantages of trajectories."""
        ending = self.forest.endings
        found = {"reward": spread(ending.reward[indices]), "advantage": spread(ending.advantage[indices])}
        each = " each" if len(indices) > 1 else ""
        return [
            f"{name} {figure}{each}" if figure.min == figure.max else f"{name}s {figure}"
            for name, figure in found.items()
            if figure
        ]

    def left_out(self, prefix: str, what: str, ranges: list[tuple[int, int]]) -> Line:
        """A line for the nodes of `ranges` that are not drawn."""
        start, ending = self.forest.start, self.forest.endings
        tokens = sum(int(start[stop] - start[first]) for first, stop in ranges)
        indices = [i for first, stop in ranges for i in ending.within(first, stop)]
        parts = [counted(len(indices), "trajectory"), counted(tokens, "token"), *self._figures(indices)]
        text = f"... {what}"
        for separator, part in zip([": ", ", ", ", ", ", "], parts, strict=False):
            if width_of(text + separator + part) <= self.room(prefix):
                text += separator + part
        return self.line(None, prefix, StyledText(text, "faint"))
