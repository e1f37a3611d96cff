"""The lines below the header of a node: its tokens as ids or as text, with the trained ones marked.

    ids     7 8 [1 2 3] 9 ... 1,180 more ... [4 5]*0.5    brackets mark a trained run, with its loss weight if not 1
    text    + trained text                                a row of text; `+` marks trained tokens
              untrained text

A segment is a run of tokens of one loss weight, or a trained run with many weights. Long ones lose their middle, with
the number of tokens left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
from rich.text import Text

from treepack.analysis.show.decoding import CONTEXT, TokenDecoder
from treepack.analysis.show.forest import DrawnForest
from treepack.analysis.show.wrapping import ESCAPE, FAINT, SPECIAL, TRAINED, TextRow, TokenText, wrap

# Tokens drawn at the head and the tail of a stretch of text without special tokens: some four rows and some two. A
# stretch that would lose FEW tokens or fewer is drawn whole, because the line about the rest takes a row itself.
_HEAD, _TAIL, _FEW = 64, 32, 32
_MAX_WEIGHTS = 8  # segments of a trained run; one with a weight for every token would be cut everywhere
TRAINED_MARK, _UNTRAINED_MARK = "+ ", "  "

_Word = tuple[str, str]  # a token id, perhaps with a bracket, and its style


@dataclass(frozen=True, slots=True)
class DrawingOptions:
    """Options of a drawing."""

    width: int = 100  # columns of the terminal
    full: bool = False  # draws all tokens of a node, not only the first and last ones
    decoder: TokenDecoder | None = None  # draws text; None draws token ids


@dataclass(frozen=True, slots=True)
class WeightSegment:
    """The tokens `first .. stop - 1` of a node. Their loss weights, `low` to `high`, are all 0 or all positive."""

    first: int
    stop: int
    low: float
    high: float

    @property
    def trained(self) -> bool:
        return self.high > 0


def segments(forest: DrawnForest, node: int, *, most: int = _MAX_WEIGHTS) -> list[WeightSegment]:
    """Return the maximal runs of equal loss weight in a node; more than `most` trained runs in sequence are joined."""
    first, stop = forest.start[node : node + 2].tolist()
    weight = forest.loss_weight[first:stop]
    # weight [0, 0, 1, .5, 0] -> bounds [0, 2, 3, 4, 5] -> runs 0-2 of 0; 2-3 of 1 and 3-4 of .5, together; 4-5 of 0
    cuts = (np.flatnonzero(np.diff(weight)) + 1).tolist()
    bounds = [0, *cuts, stop - first]
    result: list[WeightSegment] = []
    for trained, run in groupby(pairwise(bounds), key=lambda bound: weight[bound[0]] > 0):
        parts = list(run)
        if trained and len(parts) > most:
            parts = [(parts[0][0], parts[-1][1])]
        result += [
            WeightSegment(first + a, first + b, float(weight[a:b].min()), float(weight[a:b].max())) for a, b in parts
        ]
    return result


def ids_rows(forest: DrawnForest, node: int, look: DrawingOptions, width: int) -> Iterator[TextRow]:
    """Yield the ids of a node: one row without the middle, or as many rows as all of them need."""
    first, stop = forest.start[node : node + 2].tolist()
    words = _StyledTokens(forest.tokens[first:stop].tolist(), forest.loss_weight[first:stop].tolist())
    yield from _id_rows(words, first, look, width)


def segment_ids(forest: DrawnForest, segment: WeightSegment, look: DrawingOptions, width: int) -> Iterator[TextRow]:
    """Yield the ids of a segment after its mark, without brackets."""
    ids = forest.tokens[segment.first : segment.stop].tolist()
    words = _StyledTokens(ids, [0.0] * len(ids), TRAINED if segment.trained else "")
    for row in _id_rows(words, segment.first, look, width - len(TRAINED_MARK)):
        yield _add_mark(row, segment)


def segment_text(
    forest: DrawnForest, node: int, segment: WeightSegment, look: DrawingOptions, width: int
) -> Iterator[TextRow]:
    """Yield the text of a segment, wrapped, after its mark; long stretches lose their middle."""
    chunks = _chunks(forest, node, segment, look)
    if segment.first > forest.start[node]:
        before = segment.first - 1
    else:
        # The last token of the parent, which precedes the node on its path but perhaps not in `tokens`.
        before = int(forest.start[forest.parent[node] + 1]) - 1 if forest.parent[node] >= 0 else -1
    begins = before < 0 or bool(forest.loss_weight[before] > 0) != segment.trained
    for row in wrap(chunks, width=width - len(TRAINED_MARK), trained=segment.trained, begins=begins):
        yield _add_mark(row, segment)


def _add_mark(row: TextRow, segment: WeightSegment) -> TextRow:
    """Return `row` after the mark of its segment."""
    mark = (TRAINED_MARK, TRAINED) if segment.trained else _UNTRAINED_MARK
    return TextRow(row.place, Text.assemble(mark, row.text))


def _chunks(forest: DrawnForest, node: int, segment: WeightSegment, look: DrawingOptions) -> Iterator[TokenText]:
    """Yield the decoded text of a segment, and a chunk for each stretch that is left out."""
    assert look.decoder is not None
    node_start = int(forest.start[node])
    ids = forest.tokens[node_start : segment.stop].tolist()
    before, offset = forest.path_before(node, CONTEXT), segment.first - node_start
    done = 0
    for first, stop in _ranges(ids[offset:], look):
        if first > done:
            yield TokenText(0, f"... {first - done:,} tokens ...", FAINT, whole=True)
        context = (before + ids[: offset + first])[-CONTEXT:]
        for token in look.decoder.decode(ids[offset + first : offset + stop], context):
            style = SPECIAL if token.special else ESCAPE if token.unknown else ""
            yield TokenText(segment.first + first + token.index, token.text, style)
        done = stop


def _ranges(ids: list[int], look: DrawingOptions) -> list[tuple[int, int]]:
    """Return the ranges of `ids` to draw: all but the middle of long stretches between special tokens."""
    assert look.decoder is not None
    special = np.flatnonzero(np.isin(ids, list(look.decoder.special))).tolist()
    ranges: list[tuple[int, int]] = []
    # 300 ids, the one at 200 special -> (0, 64), (168, 300): the middle of 0-199 is out, 201-299 is short enough
    start_of_stretch = start_of_range = 0
    for stop in [*special, len(ids)]:
        if not look.full and stop - start_of_stretch > _HEAD + _TAIL + _FEW:
            ranges.append((start_of_range, start_of_stretch + _HEAD))
            start_of_range = stop - _TAIL
        start_of_stretch = stop + 1
    return [*ranges, (start_of_range, len(ids))]


@dataclass(frozen=True, slots=True)
class _StyledTokens:
    """Token ids to be drawn, with their loss weights, and the style of ids of weight 0."""

    ids: list[int]
    weights: list[float]
    style: str = ""

    def within(self, first: int, stop: int) -> list[_Word]:
        """Return the ids `first .. stop - 1` as words, with brackets around the runs of one weight that is not 0."""
        # ids [7, 8, 9, 4], weights [0, 1, 1, .5] -> 7 [8 9] [4]*0.5
        words = []
        for i in range(max(first, 0), min(stop, len(self.ids))):
            weight, word = self.weights[i], str(self.ids[i])
            if weight and (i == 0 or self.weights[i - 1] != weight):
                word = "[" + word
            if weight and (i + 1 == len(self.ids) or self.weights[i + 1] != weight):
                word += "]" if weight == 1 else f"]*{weight:.4g}"
            words.append((word, TRAINED if weight else self.style))
        return words


def _id_rows(words: _StyledTokens, first: int, look: DrawingOptions, width: int) -> Iterator[TextRow]:
    """Yield rows of `words`, the first of which is token `first`."""
    num = len(words.ids)
    if look.full:
        yield from _full_rows(words.within(0, num), first, width)
        return
    # A word takes at least two columns, its blank included, so no more of them than this fit.
    max_words = width // 2 + 1
    if num <= max_words and sum(len(word) + 1 for word, _ in words.within(0, num)) - 1 <= width:
        yield TextRow(first, _join(words.within(0, num)))
        return
    room = width - len(f" ... {num:,} more ... ")
    head = _take(words.within(0, max_words), room * 2 // 3)
    tail = _take(words.within(num - max_words, num)[::-1], room // 3)[::-1]
    left_out = Text(f" ... {num - len(head) - len(tail):,} more ... ", FAINT)
    yield TextRow(first, Text.assemble(_join(head), left_out, _join(tail)))


def _full_rows(words: list[_Word], first: int, width: int) -> Iterator[TextRow]:
    """Yield rows of all `words`, each row as full as its width allows."""
    start = used = 0
    for i, (word, _) in enumerate(words):
        if i > start and used + 1 + len(word) > width:
            yield TextRow(first + start, _join(words[start:i]))
            start, used = i, 0
        used += len(word) + (i > start)
    yield TextRow(first + start, _join(words[start:]))


def _take(words: list[_Word], room: int) -> list[_Word]:
    """Return the first of `words` that fit `room` columns, at least one."""
    used = -1
    for i, (word, _) in enumerate(words):
        used += 1 + len(word)
        if used > room and i:
            return words[:i]
    return words


def _join(words: list[_Word]) -> Text:
    """Return `words` with blanks between them; neighbours of one style are one span."""
    runs = groupby(words, key=itemgetter(1))
    return Text(" ").join(Text(" ".join(word for word, _ in run), style) for style, run in runs)
