"""Token ids to text, each piece with the token that completes it.

    ids       [.. 12, 226, 130, 172, 9 ..]     226 130 172 are the bytes of one character
    pieces    (0, " costs"), (3, "\\u20ac"), (4, "5")

Single tokens have no text: a character may be split over several, and some tokenizers write a word's space only behind
another word. So every piece is what a token adds to the text of those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CONTEXT = 12  # tokens before a run that are decoded with it, in which some character of at most four bytes ends
MOST_PENDING = 8  # tokens that may wait for the end of a character; more are no character
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """What token `index` adds to the text; `special` tokens stand alone, an `unknown` id has no text."""

    index: int
    text: str
    special: bool = False
    unknown: bool = False


class Decoder:
    """The text of token ids by a fast tokenizer of transformers, special tokens written out."""

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer and the ids that it treats as special."""
        self._backend = tokenizer.backend_tokenizer
        self.special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def pieces(self, ids: list[int], before: list[int]) -> Iterator[Piece]:
        """The pieces of `ids`, which follow `before`; a character cut off at the end is a replacement character."""
        run: list[int] = []  # since the last special or unknown id
        done = 0  # of run, tokens whose text was given
        for index, token in enumerate([*before[-CONTEXT:], *ids], start=-len(before[-CONTEXT:])):
            alone = token in self.special or self._backend.id_to_token(token) is None
            if not alone:
                run.append(token)
                new = self._added(run, done)
                if not new.endswith(REPLACEMENT) or len(run) - done > MOST_PENDING:
                    if index >= 0 and new:
                        yield Piece(index, new)
                    run = run[done:]
                    done = len(run)
                continue
            if index > 0 and (new := self._added(run, done)):
                yield Piece(index - 1, new)
            known = token in self.special
            run = [token] if known else []  # as context, for decoders strip the blank of a word that nothing precedes
            done = len(run)
            if index >= 0:
                yield Piece(index, self._text([token]) if known else f"<unknown id {token}>", known, not known)
        if ids and (new := self._added(run, done)):
            yield Piece(len(ids) - 1, new)

    def _added(self, run: list[int], done: int) -> str:
        if len(run) == done:
            return ""
        text, known = self._text(run), self._text(run[:done])
        return text[len(known) :] if text.startswith(known) else text[-1:]

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))
