"""What stands below the first line of a node: its tokens as ids or as text, with the trained ones marked.

    ids     7 8 [1 2 3] 9 ... 1,180 more ... [4 5]*0.5    brackets hold a trained run, with its loss weight if not 1
    text    + trained text                                a row of text; `+` marks what is trained
              and what is not

A segment is a run of tokens of one loss weight, or a trained run of many. Long ones lose their middle, with the number
of tokens left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from treepack.analysis.show.decoding import CONTEXT, Decoder
from treepack.analysis.show.forest import DrawnForest
from treepack.analysis.show.wrapping import Chunk, Line, StyledText, TextRow, wrap

# Tokens that are shown of a stretch of text without special tokens, unless all are asked for or few would be left out.
HEAD, TAIL, FEW = 64, 32, 32
MOST_WEIGHTS = 8  # runs of equal weight that a run of trained tokens is cut into
TRAINED, UNTRAINED = "+ ", "  "


@dataclass(frozen=True, slots=True)
class Look:
    """How a forest is drawn: columns of the terminal, everything or not, text by `decoder` or ids."""

    width: int = 100
    full: bool = False
    decoder: Decoder | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens `first .. stop - 1` of a node, with loss weights from `low` to `high`: all of them 0, or none."""

    first: int
    stop: int
    low: float
    high: float

    @property
    def trained(self) -> bool:
        return self.high > 0


def segments(forest: DrawnForest, node: int, *, most: int = MOST_WEIGHTS) -> list[Segment]:
    """The maximal runs of equal loss weight in a node; a trained run of more than `most` of them is one segment."""
    first, stop = forest.start[node : node + 2].tolist()
    weight = forest.loss_weight[first:stop]
    cuts = (np.flatnonzero(np.diff(weight)) + 1).tolist()
    bounds = [0, *cuts, stop - first]
    found: list[Segment] = []
    for trained, run in groupby(pairwise(bounds), key=lambda bound: weight[bound[0]] > 0):
        parts = list(run)
        if trained and len(parts) > most:
            parts = [(parts[0][0], parts[-1][1])]
        found += [Segment(first + a, first + b, float(weight[a:b].min()), float(weight[a:b].max())) for a, b in parts]
    return found


def ids_rows(forest: DrawnForest, node: int, look: Look, width: int) -> Iterator[TextRow]:
    """All ids of a node on one row, the middle left out if they are too many; or on as many rows as they need."""
    first, stop = forest.start[node : node + 2].tolist()
    yield from _ids(forest.tokens[first:stop].tolist(), forest.loss_weight[first:stop].tolist(), first, look, width)


def segment_ids(forest: DrawnForest, segment: Segment, look: Look, width: int) -> Iterator[TextRow]:
    """The ids of a segment behind its mark."""
    ids = forest.tokens[segment.first : segment.stop].tolist()
    for row in _ids(ids, [0.0] * len(ids), segment.first, look, width - len(TRAINED)):
        yield _marked(TextRow(row.place, _as_trained(row.spans, segment)), segment)


def segment_text(forest: DrawnForest, node: int, segment: Segment, look: Look, width: int) -> Iterator[TextRow]:
    """The text of a segment, wrapped, behind its mark; the middle of long stretches is left out."""
    chunks = _chunks(forest, node, segment, look)
    if segment.first > forest.start[node]:
        before = segment.first - 1
    else:
        before = int(forest.start[forest.parent[node] + 1]) - 1 if forest.parent[node] >= 0 else -1
    begins = before < 0 or (forest.loss_weight[before] > 0) != segment.trained
    for row in wrap(chunks, width=width - len(TRAINED), trained=segment.trained, begins=begins):
        yield _marked(row, segment)


def _marked(row: TextRow, segment: Segment) -> TextRow:
    mark = TRAINED if segment.trained else UNTRAINED
    return TextRow(row.place, (StyledText(mark, "", segment.trained), *row.spans))


def _as_trained(line: Line, segment: Segment) -> Line:
    return tuple(StyledText(span.text, span.style, segment.trained and not span.style) for span in line)


def _chunks(forest: DrawnForest, node: int, segment: Segment, look: Look) -> Iterator[Chunk]:
    assert look.decoder is not None
    own = int(forest.start[node])
    ids = forest.tokens[own : segment.stop].tolist()
    before, offset = forest.path_before(node, CONTEXT), segment.first - own
    done = 0
    for first, stop in _kept(ids[offset:], look):
        if first > done:
            yield Chunk(0, f"... {first - done:,} tokens ...", "faint", whole=True)
        known = (before + ids[: offset + first])[-CONTEXT:]
        for piece in look.decoder.pieces(ids[offset + first : offset + stop], known):
            style = "special" if piece.special else "escape" if piece.unknown else ""
            yield Chunk(segment.first + first + piece.index, piece.text, style)
        done = stop


def _kept(ids: list[int], look: Look) -> list[tuple[int, int]]:
    """Ranges of `ids` to show: everything but the middle of long stretches between special tokens."""
    assert look.decoder is not None
    special = np.flatnonzero(np.isin(ids, list(look.decoder.special))).tolist()
    kept: list[tuple[int, int]] = []
    done = shown = 0
    for stop in [*special, len(ids)]:
        if not look.full and stop - done > HEAD + TAIL + FEW:
            kept += [(shown, done + HEAD)]
            shown = stop - TAIL
        done = stop + 1
    return [*kept, (shown, len(ids))]


def _ids(ids: list[int], weights: list[float], first: int, look: Look, width: int) -> Iterator[TextRow]:
    """Rows of `ids`, with brackets around runs of a weight that is not 0."""
    if look.full:
        yield from _all_ids(ids, weights, first, width)
        return
    # A word takes two columns at least, so that more of them than that cannot fit.
    most = width // 2 + 1
    if len(ids) <= most:
        words = _words(ids, weights, 0, len(ids))
        if sum(len(word.text) + 1 for word in words) - 1 <= width:
            yield TextRow(first, _joined(words))
            return
    room = width - len(f" ... {len(ids):,} more ... ")
    head = _fitting(_words(ids, weights, 0, min(most, len(ids))), room * 2 // 3)
    tail = _fitting(_words(ids, weights, max(0, len(ids) - most), len(ids))[::-1], room // 3)[::-1]
    left_out = StyledText(f" ... {len(ids) - len(head) - len(tail):,} more ... ", "faint")
    yield TextRow(first, (*_joined(head), left_out, *_joined(tail)))


def _all_ids(ids: list[int], weights: list[float], first: int, width: int) -> Iterator[TextRow]:
    words = _words(ids, weights, 0, len(ids))
    start = taken = 0
    for i, word in enumerate(words):
        if i > start and taken + 1 + len(word.text) > width:
            yield TextRow(first + start, _joined(words[start:i]))
            start, taken = i, 0
        taken += len(word.text) + (i > start)
    yield TextRow(first + start, _joined(words[start:]))


def _words(ids: list[int], weights: list[float], first: int, stop: int) -> list[StyledText]:
    words = []
    for i in range(first, stop):
        weight, text = weights[i], str(ids[i])
        if weight and (i == 0 or weights[i - 1] != weight):
            text = "[" + text
        if weight and (i + 1 == len(ids) or weights[i + 1] != weight):
            text += "]" if weight == 1 else f"]*{weight:.4g}"
        words.append(StyledText(text, "", weight != 0))
    return words


def _fitting(words: list[StyledText], room: int) -> list[StyledText]:
    """The first of `words` that fit `room` columns, one at least."""
    taken = -1
    for i, word in enumerate(words):
        taken += 1 + len(word.text)
        if taken > room and i:
            return words[:i]
    return words


def _joined(words: list[StyledText]) -> Line:
    """`words` with blanks between, those that follow each other and are trained alike in one span."""
    found: list[StyledText] = []
    for word in words:
        if found and found[-1].trained == word.trained:
            found[-1] = StyledText(f"{found[-1].text} {word.text}", "", word.trained)
        else:
            if found:
                found[-1] = StyledText(found[-1].text + " ", "", found[-1].trained)
            found.append(word)
    return tuple(found)
