"""The lines of one node: its place, its number of tokens, the tokens, and the trajectories that end in it.

    0  * 3 tokens x3, 2 trained, loss weight 6     the header
       | 7 [8 9]*3                                 the body
       | = a  reward 1                             an ending

The caller passes the text before each line, which draws the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from treepack.analysis.show.bodies import (
    TRAINED_MARK,
    DrawingOptions,
    WeightSegment,
    ids_rows,
    segment_ids,
    segment_text,
    segments,
)
from treepack.analysis.show.figures import four_digits, quantity_in_digits, spread
from treepack.analysis.show.forest import DrawnForest, num_trained_runs
from treepack.analysis.show.wrapping import FAINT, NAME, TRAINED, escape_text
from treepack.trajectory import Int64

NODES = 100  # nodes drawn of a large forest: some 250 lines, a few screens
ENDINGS = 4  # lines about trajectories at one node: all of them, or three and the number of the others
_MIN_BODY = 24  # columns of a body, even if a deep tree leaves fewer: such lines are wider than the terminal


class NodeLines:
    """The lines of single nodes of one forest."""

    def __init__(
        self,
        forest: DrawnForest,
        look: DrawingOptions,
        places: Int64,
        *,
        by_turn: bool = False,
        intervals: bool = False,
    ) -> None:
        """Number the first token of node u `places[u]`, and choose the nodes to draw."""
        self.forest, self.look, self.places, self.by_turn, self.intervals = forest, look, places, by_turn, intervals
        digits = len(str(int((places + forest.size).max())))
        self.gutter = 2 * digits + 4 if intervals else digits  # columns of "[435, 2117)", or of "435"
        self.subtree = forest.start[forest.node_end] - forest.start[:-1]  # tokens of the subtree of each node
        self.shown = np.ones(forest.num_nodes, bool)
        if not look.full and not by_turn and forest.num_nodes > NODES:
            # A parent has more tokens in its subtree than any child, so a drawn node has a drawn parent.
            self.shown[np.argsort(-self.subtree, kind="stable")[NODES:]] = False
        trained = forest.loss_weight != 0
        # trained [0, 1, 1, 0, 1] -> begins_turn [0, 1, 0, 0, 1] -> turn [0, 1, 1, 1, 2]
        self.begins_turn = trained & ~np.concatenate([[False], trained[:-1]])
        self.turn = np.cumsum(self.begins_turn)

    def line(self, place: int | str | None, prefix: str, *parts: Text | str) -> Text:
        """Return a line with its place in the gutter."""
        gutter = "" if place is None else str(place)
        return Text.assemble((f"{gutter:>{self.gutter}}  {prefix}", FAINT), *parts)

    def room(self, prefix: str) -> int:
        """Return the number of columns to the right of the gutter and `prefix`."""
        return max(_MIN_BODY, self.look.width - self.gutter - 2 - len(prefix))

    def node(self, node: int, first: str, below: str, *, notes: Iterable[str] = ()) -> Iterator[Text]:
        """Yield all lines of a node, the first one after the text `first`, the others after `below`."""
        endings = self._endings(node)
        *header, last = self.header(node, first, below, notes)
        if len(endings) == 1 and last.cell_len + 2 + cell_len(endings[0]) <= self.look.width:
            last.append("  " + endings[0], NAME)
            endings = []
        yield from (*header, last)
        yield from self.body(node, below)
        for ending in endings:
            yield self.line(None, below, Text(ending, NAME))

    def header(self, node: int, first: str, below: str, notes: Iterable[str] = ()) -> list[Text]:
        """Return the header: number of tokens, of trajectories and of trained tokens, loss weight, and `notes`."""
        forest = self.forest
        begin, stop = forest.start[node : node + 2].tolist()
        weight = forest.loss_weight[begin:stop]
        num_trained = int((weight != 0).sum())
        passing = int(forest.num_passing[node])
        parts = [Text(f"* {quantity_in_digits(stop - begin, 'token')}" + (f" x{passing:,}" if passing > 1 else ""))]
        if num_trained and not self.by_turn:
            turns, total = num_trained_runs(weight), float(weight.sum())
            parts.append(Text(f"{num_trained:,} trained" + (f" in {turns:,} turns" if turns > 1 else ""), TRAINED))
            # 1e-9: a sum of weights of 1 may be off by rounding, and "loss weight 3" after "3 trained" would repeat it.
            if abs(total - num_trained) > 1e-9 * num_trained:
                parts.append(Text(f"loss weight {four_digits(total)}", TRAINED))
        place: int | str = int(self.places[node])
        if self.intervals:
            place = f"[{place}, {forest.start[forest.node_end[node]]})"
        lines = [self.line(place, first, parts[0])]
        for part in [*parts[1:], *(Text(note, FAINT) for note in notes)]:
            if lines[-1].cell_len + 2 + part.cell_len <= self.look.width:
                lines[-1].append(", ").append_text(part)
            else:
                lines.append(self.line(None, below, part))
        return lines

    def body(self, node: int, prefix: str) -> Iterator[Text]:
        """Yield the lines with the tokens of a node."""
        forest, look, width = self.forest, self.look, self.room(prefix)
        if look.decoder is None and not self.by_turn:
            for row in ids_rows(forest, node, look, width):
                yield self.line(None, prefix, row.text)
            return
        for segment in segments(forest, node):
            if label := self._label(segment, forest.start[node] == segment.first):
                yield self.line(None, prefix, Text(TRAINED_MARK, TRAINED), Text(f"({label})", FAINT))
            if look.decoder is None:
                rows = segment_ids(forest, segment, look, width)
            else:
                rows = segment_text(forest, node, segment, look, width)
            for row in rows:
                place = None if row.place is None else int(self.places[node]) + row.place - int(forest.start[node])
                yield self.line(place, prefix, row.text)

    def _label(self, segment: WeightSegment, begins_node: bool) -> str:
        """Return the label above a trained segment: the turn that begins there, a weight that changes or is not 1."""
        first, forest = segment.first, self.forest
        if not segment.trained:
            return ""
        parts = []
        if self.by_turn and self.begins_turn[first]:
            # argmax finds the first untrained token; it is 0 if all are trained; then the turn ends with the tokens.
            stop = first + int((forest.loss_weight[first:] == 0).argmax() or len(forest.loss_weight) - first)
            parts = [f"turn {self.turn[first]}: {quantity_in_digits(stop - first, 'token')}"]
            for name, values in forest.values.items():
                known = values[first:stop][~np.isnan(values[first:stop])]
                parts += [f"mean {name} {four_digits(float(known.mean()))}"] if len(known) else []
        above = 0.0 if first == 0 or (begins_node and not self.by_turn) else float(forest.loss_weight[first - 1])
        if segment.low != segment.high:
            parts.append(f"loss weights {four_digits(segment.low)} to {four_digits(segment.high)}")
        elif segment.low not in (1, above) or above not in (0, segment.low):
            parts.append(f"loss weight {four_digits(segment.low)}")
        return ", ".join(parts)

    def _endings(self, node: int) -> list[str]:
        """Return a line for each trajectory that ends in `node`; of many, the last line counts the others.

        An id is never shortened, because a user copies it for the next command.
        """
        ending = self.forest.endings
        indices = list(ending.within(node, node + 1))
        named = indices if self.look.full or len(indices) <= ENDINGS else indices[: ENDINGS - 1]
        lines = []
        for i in named:
            notes = [escape_text(ending.notes[i])] if ending.notes and ending.notes[i] else []
            lines.append("  ".join(["= " + escape_text(ending.trajectory_ids[i]), *notes, *self._figures([i])]))
        if rest := indices[len(named) :]:
            lines.append("  ".join([f"= {len(rest):,} more", *self._figures(rest)]))
        return lines

    def _figures(self, indices: list[int]) -> list[str]:
        """Return the rewards and the advantages of trajectories in words, if any are known."""
        ending = self.forest.endings
        figures = {"reward": spread(ending.reward[indices]), "advantage": spread(ending.advantage[indices])}
        each = " each" if len(indices) > 1 else ""
        return [
            f"{name} {figure}{each}" if figure.min == figure.max else f"{name}s {figure}"
            for name, figure in figures.items()
            if figure
        ]

    def left_out(self, prefix: str, what: str, ranges: list[tuple[int, int]]) -> Text:
        """Return a line for the nodes of `ranges` [first, stop), which are not drawn: as many facts as fit."""
        start, ending = self.forest.start, self.forest.endings
        tokens = sum(int(start[stop] - start[first]) for first, stop in ranges)
        indices = [i for first, stop in ranges for i in ending.within(first, stop)]
        parts = [
            quantity_in_digits(len(indices), "trajectory"),
            quantity_in_digits(tokens, "token"),
            *self._figures(indices),
        ]
        text = f"... {what}"
        for separator, part in zip([": ", ", ", ", ", ", "], parts, strict=False):
            if cell_len(text + separator + part) <= self.room(prefix):
                text += separator + part
        return self.line(None, prefix, Text(text, FAINT))
