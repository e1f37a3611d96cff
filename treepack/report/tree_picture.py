"""The picture of the group that the page opens: one line for each rollout, with roles, trained tokens and texts.

    Axes, ReportSubject, ReportFigures, PageContents --draw_tree--> axes

Blocks are runs of tokens as in `outline`, coloured by role, and hatched if their tokens are trained. A common prompt
that would take much of the width is folded. At the right are the rewards and the names of the rollouts.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from treepack.report.contents import PageContents
from treepack.report.figures import ReportFigures, ReportSubject
from treepack.report.outline import NodeBlock, outline
from treepack.report.roles import ROLES
from treepack.report.segments import STARTS, TRAINED
from treepack.report.words import three_digits
from treepack.trajectory import Int64

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The light colours of the page, by role.
ROLE_COLOURS = {
    "unknown": "#e3e7ec",
    "system": "#dfe3e9",
    "user": "#b4d5f3",
    "assistant": "#fadfae",
    "tool": "#a6d8c5",
}
TEXT, MUTED, HATCH = "#1b2127", "#5b6672", "#c99a4b"
WIDE_PROMPT, FOLDED = 0.2, 0.12  # shares of the width: a longer common prompt is folded to the second one
INSET = 0.18  # share of the height of a branch in a line that is left free above and below it
GAP = 0.04  # rows between lines
LETTERS = 132  # monospaced letters of 5 points in the width of the picture
MAX_LINES = 60  # rollouts drawn; more would be thinner than a pixel of print
TAG = re.compile(r"</?(?:think|tool_call|tool_response)>")
MAX_TEXTS = 4  # nodes of a block whose text is read: a chunk of texts is parsed for each
MAX_NAME = 22  # letters of a rollout's name


def draw_tree(axes: Axes, subject: ReportSubject, figures: ReportFigures, contents: PageContents) -> None:
    """Draw the tree of the group with the largest spread of rewards."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch

    part, rollouts = figures.opened_group, figures.rollouts
    members = np.flatnonzero(figures.groups.of == part)
    lines = np.unique(rollouts.of[members])[:MAX_LINES]
    blocks = outline(subject.trie, members[np.isin(rollouts.of[members], lines)], rollouts)
    place, width = _scale(blocks)
    stripes, trained = defaultdict(list), []
    for block in blocks:
        for kind, patch in _stripes(block, contents, place):
            stripes[ROLES[kind & (TRAINED - 1)]].append(patch)
            if kind & TRAINED:
                trained.append(patch)
    for role, patches in stripes.items():
        axes.add_collection(PatchCollection(patches, facecolor=ROLE_COLOURS[role], edgecolor="none"))
    if trained:
        hatch: dict[str, Any] = {"facecolor": "none", "edgecolor": HATCH, "hatch": "/////", "linewidth": 0}
        axes.add_collection(PatchCollection(trained, **hatch))
    frames = [_frame(place(block.x), place(block.x + block.size), block) for block in blocks]
    axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor="white", linewidth=0.7))
    rows = max(block.row + block.rows for block in blocks)
    for block in blocks:
        _write_words(axes, block, contents, (place, width, rows))
        if not block.is_branch and not block.lines and rows <= MAX_LINES:
            _write_end(axes, block, figures, width)
    axes.set_xlim(0, width)
    axes.set_ylim(rows, 0)  # the first row at the top, as in the explorer
    axes.set_axis_off()
    roles = [Patch(facecolor=ROLE_COLOURS[role], label=role) for role in ROLES if role in stripes and role != "unknown"]
    legend = [*roles, Patch(facecolor="white", edgecolor=HATCH, hatch="/////", linewidth=0.5, label="trained")]
    place_below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncol": len(legend)}
    place_below |= {"frameon": False, "fontsize": 7, "handlelength": 1.2}
    axes.legend(handles=legend, **place_below)
    axes.set_title(_title(figures, part, len(lines)), loc="left", fontsize=9, color=TEXT, parse_math=False)


def _title(figures: ReportFigures, part: int, num_shown: int) -> str:
    count = int(figures.group_outcomes.num_rollouts[part])
    first = f", the first {num_shown}" if num_shown < count else ""
    tokens = f"{int(figures.groups.tree[part]):,} tokens for {int(figures.groups.flat[part]):,}"
    return f"{figures.groups.names[part]}: {count:,} rollout{'' if count == 1 else 's'}{first}, {tokens}"


def _scale(blocks: list[NodeBlock]) -> tuple[Callable[[float], float], float]:
    """Return the place of a token on a line, and the width of all lines; a wide common prompt is folded."""
    end = max(block.x + block.size for block in blocks)
    prompt = blocks[0].size if len(blocks) > 1 and blocks[0].last == len(blocks) else 0
    if prompt <= WIDE_PROMPT * end:
        return float, float(end)
    # prompt 800 of 1,000, folded 0.12: it takes 0.12 / 0.88 of the other 200, and token 400 is in its middle
    folded = (end - prompt) * FOLDED / (1 - FOLDED)
    return lambda x: x * folded / prompt if x <= prompt else folded + x - prompt, folded + end - prompt


def _frame(left: float, right: float, block: NodeBlock) -> Any:
    from matplotlib.patches import Rectangle

    inset = INSET * block.rows if block.is_branch else GAP
    return Rectangle((left, block.row + inset), right - left, block.rows - 2 * inset)


def _stripes(block: NodeBlock, contents: PageContents, place: Callable[[float], float]) -> list[tuple[int, Any]]:
    """Return the kind and the rectangle of each segment of a block."""
    first, kinds, of_node = contents.segments.first, contents.segments.kind, contents.segments.of_node
    stripes, x = [], block.x
    for node in block.nodes:
        a, b = int(of_node[node]), int(of_node[node + 1])
        for size, kind in zip(np.diff(first[a : b + 1]).tolist(), kinds[a:b].tolist(), strict=True):
            stripes.append((kind & (STARTS - 1), _frame(place(x), place(x + size), block)))
            x += size
    return stripes


def _write_words(
    axes: Axes, block: NodeBlock, contents: PageContents, scale: tuple[Callable[[float], float], float, int]
) -> None:
    """Write the number of tokens and the first words of the longest segment, if the block is wide enough."""
    place, width, rows = scale
    left = place(block.x)
    letters = int((place(block.x + block.size) - left) / width * LETTERS)
    lines = min(6, int(block.rows / rows * 22) - 1)
    if letters < 5 or lines < 0:
        return
    words = wrap(_text(block, contents), letters - 1, max_lines=max(1, lines), placeholder="...") if lines else []
    top = block.row + (INSET * block.rows if block.is_branch else GAP) + rows * 0.012
    style: dict[str, Any] = {"va": "top", "color": TEXT, "clip_on": True, "parse_math": False}
    margin = width * 0.004
    axes.text(left + margin, top, f"{block.size:,}", fontsize=6, fontweight="bold", **style)
    if words and letters > 9:
        axes.text(left + margin, top + rows * 0.045, "\n".join(words), fontsize=5, family="monospace", **style)


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


def _write_end(axes: Axes, block: NodeBlock, figures: ReportFigures, width: float) -> None:
    """Write the reward and the names of the rollouts of a line at its right end."""
    finals: Int64 = np.array(block.finals, np.int64)
    rewards = figures.rollouts.reward[finals]
    reward = f"{three_digits(float(np.nanmean(rewards)))}  " if len(rewards) and not np.isnan(rewards).all() else ""
    names = [figures.rollouts.labels[i] for i in block.finals]
    name = names[0] if len(names) == 1 else f"{len(names)} rollouts"
    name = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME // 2]}...{name[-MAX_NAME // 2 :]}"
    middle = block.row + block.rows / 2
    style: dict[str, Any] = {"va": "center", "fontsize": 6.5, "clip_on": False, "parse_math": False}
    axes.text(width * 1.01, middle, f"{reward}{name}", color=MUTED, **style)
