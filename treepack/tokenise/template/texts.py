"""Renderings of one conversation that share their beginning: a chain of chunks, and a tail that each has for itself.

    rendering of 2 messages    <|user|>Hi<|end|>                                   tail <|assistant|>
    rendering of 3 messages    <|user|>Hi<|end|> <- <|assistant|>Hello<|end|>      tail ""

Equal chunks after equal chunks are one object, so the cost of comparing two renderings is the length of their
different ends, and not the length of the conversation.
"""

from __future__ import annotations

_MIN_WINDOW = 256  # characters that `ChainedText.ending` looks at first


class TextChunk:
    """A part of a text after its `parent`; `end` is the number of characters up to its end."""

    __slots__ = ("end", "parent", "text")

    def __init__(self, parent: TextChunk | None, text: str) -> None:
        """Append `text` to the text that ends with `parent`."""
        self.parent, self.text = parent, text
        self.end: int = len(text) + (parent.end if parent else 0)


ROOT = TextChunk(None, "")


class TextChunks:
    """The chunks of one conversation, each once."""

    def __init__(self) -> None:
        self._chunks: dict[
            tuple[int, str], TextChunk
        ] = {}  # by the identity of the parent, which the chunk keeps alive

    def after(self, parent: TextChunk, text: str) -> TextChunk:
        """Return the chunk with `text` after `parent`: `parent` itself if `text` is empty."""
        if not text:
            return parent
        key = (id(parent), text)
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = TextChunk(parent, text)
        return chunk


class ChainedText:
    """An immutable text: all characters up to the end of `chunk`, then `tail`."""

    __slots__ = ("chunk", "tail")

    def __init__(self, tail: str, chunk: TextChunk = ROOT) -> None:
        """Append `tail` to the text that ends with `chunk`."""
        self.chunk, self.tail = chunk, tail

    def __len__(self) -> int:
        """Return the number of characters."""
        return self.chunk.end + len(self.tail)

    def __str__(self) -> str:
        """Return all characters; O(length)."""
        return self.slice(0)

    def slice(self, start: int, end: int | None = None) -> str:
        """Return the characters from `start` to `end`; O(length - start)."""
        chunk, begin, parts = self._back_to(start)
        assert chunk.end == begin
        return "".join(parts)[start - begin : None if end is None else max(end - begin, 0)]

    def prefix(self, end: int) -> ChainedText:
        """Return the first `end` characters; O(length - end)."""
        chunk, begin, parts = self._back_to(end)
        return ChainedText("".join(parts)[: end - begin], chunk)

    def plus(self, text: str) -> ChainedText:
        """Return this text with `text` after it."""
        return ChainedText(self.tail + text, self.chunk)

    def startswith(self, other: ChainedText) -> bool:
        """Return True if the text starts with `other`; O(characters after the last common chunk)."""
        if len(other) > len(self):
            return False
        shared = common(self, other)
        return self.slice(shared, len(other)) == other.slice(shared)

    def ending(self, size: int) -> str:
        """Return an end of the text with at least `size` characters that are not whitespace, or the whole text."""
        window = _MIN_WINDOW
        while True:
            end = self.slice(max(0, len(self) - window))
            if window >= len(self) or sum(map(len, end.split())) >= size:
                return end
            window *= 2

    def _back_to(self, position: int) -> tuple[TextChunk, int, list[str]]:
        """Return the last chunk that ends at `position` or before it, its end, and the texts after it."""
        chunk, parts = self.chunk, [self.tail]
        while chunk.end > position:
            parts.append(chunk.text)
            assert chunk.parent is not None
            chunk = chunk.parent
        return chunk, chunk.end, parts[::-1]


def common(a: ChainedText, b: ChainedText) -> int:
    """Return a number of first characters that are equal in both: up to the end of their last common chunk."""
    x, y = a.chunk, b.chunk
    while x is not y:
        # Chunks are not empty, so the longer of two different texts, or either if they are as long, ends later.
        if x.end >= y.end:
            assert x.parent is not None
            x = x.parent
        else:
            assert y.parent is not None
            y = y.parent
    return x.end
