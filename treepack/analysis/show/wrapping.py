"""Styles of lines, escapes for characters that are not printable, and text cut into rows that fit a terminal.

    "Hi\\n\\tyou \\x1b[2J"  ->   Hi\\n              a line break ends the row and is written out
                               \\tyou \\x1b[2J     every other character that is not printable is written out, too

Wide characters take two columns and combining characters none (`rich.cells`), so rows break at the width of a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Style names of rich. Colour never carries information alone: `+` and brackets mark trained tokens, too.
NAME, FAINT, SPECIAL, ESCAPE, TRAINED = "bold", "dim", "cyan", "yellow", "bold green"

_BREAK_WINDOW = 24  # characters at the end of a full row in which a blank is a place to break: longer words are cut
_BLANK = "\\x20"
_MAX_TABLE_WIDTH = 1 << 16  # columns: wider than any table, so that rich never shortens an id, which a user may copy
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # "a\nb\r" -> "a\n", "b\r": splitlines would break at the "\r", too
# "a\\x1bb" -> "a", "\\x1b", "b": an escape is one unit, which no row break may split.
_UNIT = re.compile(r"\\(?:[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})|.", re.DOTALL)


@lru_cache(maxsize=4096)
def escape(character: str) -> str:
    """Return `character` if it is printable, else a printable escape for it: `\\n`, `\\x1b`, `\\u202e`."""
    if character.isprintable():
        return character
    code = ord(character)
    # 0x1b -> \x1b, 0x202e -> \u202e, 0xe0001 -> \U000e0001
    digits = f"x{code:02x}" if code < 1 << 8 else f"u{code:04x}" if code < 1 << 16 else f"U{code:08x}"
    return _SHORT.get(character) or f"\\{digits}"


def escape_text(text: str) -> str:
    """Return `text` on one line, with an escape for each character that is not printable."""
    return "".join(map(escape, text))


def shorten(text: str, width: int) -> str:
    """Return a printable text of at most `width` columns; a longer one loses its middle."""
    if cell_len(text) <= width:
        return text
    half = max(1, (width - 3) // 2)
    # rich shortens at the end, which would hide the last fields of JSON. "abcdefghij", 7 columns -> "ab...ij"
    head, tail = set_cell_size(text, half), set_cell_size(text[::-1], half)[::-1]
    return f"{head}...{tail}"


def table_lines(table: Table) -> Iterator[Text]:
    """Yield the lines of a rich table, as wide as its cells need."""
    # rich ignores the width on a terminal that is called dumb, unless it gets a height too.
    console = Console(width=_MAX_TABLE_WIDTH, height=1, color_system=None)
    for segments in console.render_lines(table, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        yield line


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text of token number `place`, to be wrapped. A `whole` text gets a row of its own."""

    place: int
    text: str
    style: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class TextRow:
    """A row of a drawing; `place` is the token that begins its line of text, None if it continues the row before."""

    place: int | None
    text: Text


def wrap(chunks: Iterable[TokenText], *, width: int, trained: bool, begins: bool = False) -> Iterator[TextRow]:
    """Yield the rows of `chunks`, broken at line breaks and at `width` columns, after a blank if one is near.

    A blank at the very end is written as an escape, because it would be invisible; so is a blank at the beginning if a
    turn `begins` or ends there. Memory is that of the longest line of text.
    """
    # Text.wrap of rich drops the blanks at a break (300 blanks in a row of 100 columns lose 200), and blanks are what
    # one checks in a chat template. So the breaks are computed here, and rich divides the text and its styles.
    for line in _lines_of_text(chunks, trained=trained, begins=begins):
        rows = line.text.divide(_breaks(line.text.plain, width))
        for i, row in enumerate(rows):
            yield TextRow(line.place if i == 0 else None, row)


def _lines_of_text(chunks: Iterable[TokenText], *, trained: bool, begins: bool) -> Iterator[TextRow]:
    """Yield the lines of text in `chunks`, unwrapped, each with its line break as an escape."""
    style = TRAINED if trained else ""
    line, place = Text(style=style), None
    for chunk in chunks:
        if chunk.whole:
            if line:
                yield TextRow(place, line)
            yield TextRow(None, Text(chunk.text, chunk.style))
            line, place = Text(style=style), None
            continue
        for part in _LINE.findall(chunk.text):
            place = place if line else chunk.place
            is_hidden = begins and part[0] == " "
            begins = False
            if is_hidden:
                line.append(_BLANK, "" if trained else ESCAPE)
            _append(line, part[is_hidden:], chunk.style)
            if part.endswith("\n"):
                yield TextRow(place, line)
                line, place = Text(style=style), None
    if line.plain.endswith(" "):
        line.right_crop()
        line.append(_BLANK, "" if trained else ESCAPE)
    if line:
        yield TextRow(place, line)


def _append(line: Text, text: str, style: str) -> None:
    """Append `text` to `line` in `style`, its escapes in a style of their own; a line of trained text has one style."""
    if line.style:
        line.append(escape_text(text))
        return
    for is_printable, characters in groupby(text, key=str.isprintable):
        line.append("".join(map(escape, characters)), style if is_printable else ESCAPE)


def _breaks(text: str, width: int) -> Iterator[int]:
    """Yield the offsets at which the rows of `text` begin, but for the first row."""
    start = used = offset = 0
    for match in _UNIT.finditer(text):
        size = cell_len(match[0])
        # A combining character has size 0 and stays with the character that it combines with.
        if size and used + size > width and offset > start:
            # Columns:  0123456789        width 8: the blank at 5 is near, so "world" moves to the next row
            #           hello world  ->   "hello " and "world"
            blank = text.rfind(" ", max(offset - _BREAK_WINDOW, start + 1), offset)
            start = offset if blank < 0 else blank + 1
            used = cell_len(text[start:offset])
            yield start
        used += size
        offset = match.end()
