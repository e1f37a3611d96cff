"""The picture of the group that the page opens: one line for each rollout, with roles, trained tokens and texts.

    ReportSubject, ReportFigures, PageContents --tree_svg--> SVG, in points of print

Blocks are runs of tokens as in `outline`, coloured by role, and hatched if their tokens are trained. A common prompt
that would take much of the width is folded. At the right are the rewards and the names of the rollouts.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from xml.etree import ElementTree

import numpy as np

from treepack.report.contents import PageContents
from treepack.report.figures import ReportFigures, ReportSubject
from treepack.report.outline import NodeBlock, outline
from treepack.report.roles import ROLES
from treepack.report.segments import STARTS, TRAINED
from treepack.report.words import printable, three_digits
from treepack.trajectory import Int64

WIDTH, HEIGHT = 504, 259.2  # points, 72 per inch: the full width of a paper
LEFT, TOP, BOTTOM = 6, 22, 236  # of the tree; above it is the title, below it the legend
LETTER = 3.0  # width of a monospaced letter of 5 points
END_LETTER = 3.8  # width of a letter of the names at the right, about
WIDE_PROMPT, FOLDED = 0.2, 0.12  # shares of the width: a longer common prompt is folded to the second one
INSET = 0.18  # share of the height of a branch in a line that is left free above and below it
GAP = 0.04  # rows between lines
MAX_LINES = 60  # rollouts drawn; more would be thinner than a pixel of print
HALO = "#ffffff"
TAG = re.compile(r"</?(?:think|tool_call|tool_response)>")
MAX_TEXTS = 4  # nodes of a block whose text is read: a chunk of texts is parsed for each
MAX_NAME = 22  # letters of a rollout's name

Element = ElementTree.Element


@dataclass(frozen=True, slots=True)
class PictureScale:
    """Points of the picture for tokens of a line and for rows; the first `prompt` tokens take the width of `folded`."""

    prompt: int
    folded: float
    end: int
    rows: int
    right: float

    def x(self, token: int) -> float:
        """Return the point of a token of a line."""
        width = self.folded + self.end - self.prompt
        at = token * self.folded / self.prompt if token < self.prompt else self.folded + token - self.prompt
        return LEFT + at / width * (self.right - LEFT)

    def y(self, row: float) -> float:
        """Return the point of the upper side of a row."""
        return TOP + row / self.rows * (BOTTOM - TOP)


def tree_svg(subject: ReportSubject, figures: ReportFigures, contents: PageContents, colours: dict[str, str]) -> str:
    """Draw the tree of the group with the largest spread of rewards, in the page's `colours` by their names."""
    part, rollouts = figures.explorer.opened_group, figures.rollouts
    members = np.flatnonzero(figures.groups.of == part)
    lines = np.unique(rollouts.of[members])[:MAX_LINES]
    blocks = outline(subject.trie, members[np.isin(rollouts.of[members], lines)], rollouts)
    rows = max(block.row + block.rows for block in blocks)
    last = [block for block in blocks if not block.is_branch and not block.lines and rows <= MAX_LINES]
    ends = [_end_text(block, figures) for block in last]
    scale = _scale(blocks, rows, right=WIDTH - 8 - END_LETTER * max(map(len, ends), default=0))
    size = {"width": str(WIDTH), "height": str(HEIGHT), "font-family": "sans-serif"}
    svg = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    _add(svg, "rect", width=WIDTH, height=HEIGHT, fill=colours["card"])
    _add_hatch(svg, colours["hatch"])
    kinds = set()
    for block in blocks:
        kinds |= _draw_stripes(svg, block, contents, scale, colours)
        frame = _rectangle(block, scale, block.x, block.x + block.size)
        _add(svg, "rect", **frame, fill="none", stroke=colours["card"], stroke_width=0.7)
    for block in blocks:
        _write_words(svg, block, contents, scale, colours["text"])
    for block, text in zip(last, ends, strict=True):
        middle = scale.y(block.row + block.rows / 2) + 2.3
        _add(svg, "text", text, x=scale.right + 4, y=middle, font_size=6.5, fill=colours["muted"])
    _draw_legend(svg, kinds, colours)
    _add(svg, "text", _title(figures, part, len(lines)), x=LEFT, y=14, font_size=9, fill=colours["text"])
    return ElementTree.tostring(svg, encoding="unicode")


def _add(parent: Element, tag: str, text: str = "", /, **attributes: float | str) -> Element:
    """Append an element; an attribute font_size is written as font-size, and numbers to a hundredth of a point."""
    shown = {
        name.replace("_", "-"): value if isinstance(value, str) else f"{value:.2f}"
        for name, value in attributes.items()
    }
    element = ElementTree.SubElement(parent, tag, shown)
    element.text = printable(text)
    return element


def _add_haloed(svg: Element, text: str, **attributes: float | str) -> None:
    """Append a text over a pale outline of its letters, so that it can be read over the lines of a hatch."""
    halo: dict[str, float | str] = {
        "fill": "none",
        "stroke": HALO,
        "stroke_width": 1.8,
        "stroke_linejoin": "round",
        "opacity": 0.85,
    }
    _add(svg, "text", text, **{**attributes, **halo})
    _add(svg, "text", text, **attributes)


def _add_hatch(svg: Element, colour: str) -> None:
    """Append the pattern of trained tokens: diagonal lines, as on the page."""
    size: dict[str, float | str] = {
        "width": 3,
        "height": 3,
        "patternUnits": "userSpaceOnUse",
        "patternTransform": "rotate(45)",
    }
    pattern = _add(_add(svg, "defs"), "pattern", id="hatch", **size)
    _add(pattern, "rect", width=0.6, height=3, fill=colour)


def _title(figures: ReportFigures, part: int, num_shown: int) -> str:
    count = int(figures.group_outcomes.num_rollouts[part])
    first = f", the first {num_shown}" if num_shown < count else ""
    tokens = f"{int(figures.groups.tree[part]):,} tokens for {int(figures.groups.flat[part]):,}"
    return f"{figures.groups.names[part]}: {count:,} rollout{'' if count == 1 else 's'}{first}, {tokens}"


def _scale(blocks: list[NodeBlock], rows: int, *, right: float) -> PictureScale:
    end = max(block.x + block.size for block in blocks)
    prompt = blocks[0].size if len(blocks) > 1 and blocks[0].last == len(blocks) else 0
    if prompt <= WIDE_PROMPT * end:
        return PictureScale(0, 0, end, rows, right)
    # prompt 800 of 1,000, folded 0.12: it takes 0.12 / 0.88 of the other 200, and token 400 is in its middle
    return PictureScale(prompt, (end - prompt) * FOLDED / (1 - FOLDED), end, rows, right)


def _rectangle(block: NodeBlock, scale: PictureScale, start: int, stop: int) -> dict[str, float]:
    left, top = scale.x(start), scale.y(block.row + _inset(block))
    bottom = scale.y(block.row + block.rows - _inset(block))
    return {"x": left, "y": top, "width": scale.x(stop) - left, "height": bottom - top}


def _inset(block: NodeBlock) -> float:
    """Return the rows that are left free above and below a block."""
    return INSET * block.rows if block.is_branch else GAP


def _draw_stripes(
    svg: Element, block: NodeBlock, contents: PageContents, scale: PictureScale, colours: dict[str, str]
) -> set[int]:
    """Draw each segment of a block in the colour of its role, and return their kinds."""
    kinds, x = set(), block.x
    for size, kind in _segments(block, contents):
        rectangle = _rectangle(block, scale, x, x + size)
        _add(svg, "rect", **rectangle, fill=colours[_colour_name(kind)])
        if kind & TRAINED:
            _add(svg, "rect", **rectangle, fill="url(#hatch)")
        kinds.add(kind)
        x += size
    return kinds


def _segments(block: NodeBlock, contents: PageContents) -> Iterator[tuple[int, int]]:
    """Yield the tokens and the kind of each segment of a block, without the mark of its start."""
    first, kinds, of_node = contents.segments.first, contents.segments.kind, contents.segments.of_node
    for node in block.nodes:
        a, b = int(of_node[node]), int(of_node[node + 1])
        for size, kind in zip(np.diff(first[a : b + 1]).tolist(), kinds[a:b].tolist(), strict=True):
            yield size, kind & (STARTS - 1)


def _colour_name(kind: int) -> str:
    role = ROLES[kind & (TRAINED - 1)]
    return "unknown-role" if role == "unknown" else role


def _draw_legend(svg: Element, kinds: set[int], colours: dict[str, str]) -> None:
    """Draw the roles that occur, and the hatch of trained tokens, below the tree."""
    names = {_colour_name(kind) for kind in kinds}
    entries = [(role, colours[role]) for role in ROLES if role in names] + [("trained", "url(#hatch)")]
    x = (WIDTH - 60 * len(entries)) / 2
    for name, fill in entries:
        _add(svg, "rect", x=x, y=BOTTOM + 8, width=10, height=7, fill=fill, stroke=colours["line"], stroke_width=0.5)
        _add(svg, "text", name, x=x + 14, y=BOTTOM + 14, font_size=7, fill=colours["text"])
        x += 60


def _write_words(svg: Element, block: NodeBlock, contents: PageContents, scale: PictureScale, colour: str) -> None:
    """Write the number of tokens and the first words of the longest segment, if the block is wide enough."""
    left = scale.x(block.x)
    letters = int((scale.x(block.x + block.size) - left - 3) / LETTER)
    lines = min(6, int(block.rows / scale.rows * 22) - 1)
    if letters < 5 or lines < 0:
        return
    words = wrap(_text(block, contents), letters - 1, max_lines=max(1, lines), placeholder="...") if lines else []
    x, y = left + 2, scale.y(block.row + _inset(block)) + 7
    _add_haloed(svg, f"{block.size:,}", x=x, y=y, font_size=6, font_weight="bold", fill=colour)
    if letters > 9:
        for number, line in enumerate(words, 1):
            _add_haloed(svg, line, x=x, y=y + 1 + 6 * number, font_size=5, font_family="monospace", fill=colour)


def _text(block: NodeBlock, contents: PageContents) -> str:
    """Return the text of a block without special tokens and headers; none if the page has no text."""
    texts = contents.texts
    if texts is None:
        return ""
    text = ""
    for node in block.nodes[:MAX_TEXTS]:
        chunk = bisect_right(texts.first_node, node) - 1
        text += "".join(json.loads(texts.chunks[chunk])[node - texts.first_node[chunk]])
    for token in [*(header.text for header in contents.headers), *contents.special]:
        text = text.replace(token, " ")
    text = TAG.sub(" ", text)
    # Characters that the font lacks would be boxes.
    return " ".join("".join(letter if letter.isascii() else " " for letter in text[:2000]).split())


def _end_text(block: NodeBlock, figures: ReportFigures) -> str:
    """Return the reward and the names of the rollouts of a line."""
    finals: Int64 = np.array(block.finals, np.int64)
    rewards = figures.rollouts.reward[finals]
    reward = f"{three_digits(float(np.nanmean(rewards)))}  " if len(rewards) and not np.isnan(rewards).all() else ""
    names = [figures.rollouts.labels[i] for i in block.finals]
    name = names[0] if len(names) == 1 else f"{len(names)} rollouts"
    return reward + (name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 2]}...{name[-MAX_NAME // 2 :]}")
