"""Lines of styled text, and text cut into rows that fit a terminal and cannot drive it.

    "Hi\\n\\tyou \\x1b[2J"  ->   Hi\\n              a line break ends the row and is written out
                               \\tyou \\x1b[2J     so is every other character that is not printable

Wide characters take two columns, combining ones none, so that rows break where a terminal would break them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

STYLES = ("", "name", "faint", "special", "escape")


@dataclass(frozen=True, slots=True)
class StyledText:
    """A stretch of printable text in one of `STYLES`; `trained` says that it is of trained tokens."""

    text: str
    style: str = ""
    trained: bool = False


Line = tuple[StyledText, ...]

NEAR = 24  # characters from the end of a row within which a blank is looked for to break at
BLANK = "\\x20"
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@lru_cache(maxsize=4096)
def escaped(character: str) -> str:
    """`character` if it is printable, else an escape of it that is: `\\n`, `\\x1b`, `\\u202e`."""
    if character.isprintable():
        return character
    code = ord(character)
    digits = f"x{code:02x}" if code < 1 << 8 else f"u{code:04x}" if code < 1 << 16 else f"U{code:08x}"
    return _SHORT.get(character) or f"\\{digits}"


def printable(text: str) -> str:
    """`text` on one line, with escapes for what is not printable."""
    return "".join(map(escaped, text))


@lru_cache(maxsize=4096)
def cells(character: str) -> int:
    """Columns that a printable character takes in a terminal: 0 where it combines with the one before it, 1 or 2."""
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width_of(text: str) -> int:
    """Columns that a printable text takes."""
    return sum(map(cells, text))


def shortened(text: str, width: int) -> str:
    """A printable text of at most `width` columns, its middle left out where it is longer."""
    if width_of(text) <= width:
        return text
    half = max(1, (width - 3) // 2)
    head, tail = _first(text, half), _first(text[::-1], half)[::-1]
    return f"{head}...{tail}"


def _first(text: str, width: int) -> str:
    taken = 0
    for i, character in enumerate(text):
        taken += cells(character)
        if taken > width:
            return text[:i]
    return text


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text of a token, to be wrapped; `place` is where the token stands, `whole` text stays on a row of its own."""

    place: int
    text: str
    style: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class TextRow:
    """A row: the place of the first token that begins a line of text in it, None where it goes on with one."""

    place: int | None
    spans: Line


def wrap(chunks: Iterable[Chunk], *, width: int, trained: bool, begins: bool = False) -> Iterator[TextRow]:
    """The rows of `chunks`, broken at line breaks and at `width` columns, there behind a blank if one is near.

    A blank at the very end, and one at the beginning where a turn `begins` or ends, is written as an escape, for nobody
    would see it.
    """
    spans: list[StyledText] = []  # of the row, one per character
    place: int | None = None
    taken, fresh = 0, True

    def row(count: int) -> TextRow:
        done = TextRow(place, tuple(_merged(spans[:count])))
        del spans[:count]
        return done

    for chunk in chunks:
        if chunk.whole:
            if spans:
                yield row(len(spans))
            yield TextRow(None, (StyledText(chunk.text, chunk.style),))
            place, taken, fresh = None, 0, True
            continue
        for character in chunk.text:
            shown = BLANK if begins and character == " " else escaped(character)
            begins = False
            own = width_of(shown)
            if own and taken + own > width and spans:
                yield row(_break(spans))
                place, taken = None, sum(width_of(span.text) for span in spans)
            if fresh:
                place, fresh = chunk.place, False
            spans.append(StyledText(shown, chunk.style if shown == character else "escape", trained))
            taken += own
            if character == "\n":
                yield row(len(spans))
                place, taken, fresh = None, 0, True
    if spans:
        if spans[-1].text == " ":
            spans[-1] = StyledText(BLANK, "escape", trained)
        yield row(len(spans))


def _break(spans: list[StyledText]) -> int:
    """How many of the characters of a full row stay on it."""
    for back in range(min(NEAR, len(spans) - 1)):
        if spans[-1 - back].text == " ":
            return len(spans) - back
    return len(spans)


def _merged(spans: list[StyledText]) -> Iterator[StyledText]:
    """Neighbours of one style as one span."""
    start = 0
    for i in range(1, len(spans) + 1):
        if i == len(spans) or (spans[i].style, spans[i].trained) != (spans[start].style, spans[start].trained):
            yield StyledText("".join(span.text for span in spans[start:i]), spans[start].style, spans[start].trained)
            start = i
