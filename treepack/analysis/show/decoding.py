"""Token ids to texts, each with the index of the token that completes it.

    ids       [.. 12, 226, 130, 172, 9 ..]     226 130 172 are the bytes of one character
    texts     (0, " costs"), (3, "\\u20ac"), (4, "5")

Single tokens have no text: several tokens may share a character, and some tokenizers write the space before a word only
if another word precedes it. So the text of a token is the text that it adds to the text of the tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Tokens before a run that are decoded with it. A character has at most four bytes, so one ends within so many tokens.
CONTEXT = 12
# Tokens that may wait for the end of a character: twice the four bytes of the longest one. More cannot be one.
_MAX_PENDING = 8
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class _DecodedToken:
    """Text that token `index` adds. A `special` token is decoded alone; an `unknown` id has no text."""

    index: int
    text: str
    special: bool = False
    unknown: bool = False


class TokenDecoder:
    """The text of token ids by a fast tokenizer of transformers, with special tokens written out."""

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer and the ids that it treats as special."""
        self._backend = tokenizer.backend_tokenizer
        self.special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def decode(self, ids: list[int], before: list[int]) -> Iterator[_DecodedToken]:
        """Yield the texts of `ids`, which follow `before`; a character cut at the end is a replacement character."""
        run: list[int] = []  # ids since the last special or unknown id
        done = 0  # number of ids of run whose text was yielded: they remain as context
        # Indices below 0 are context: before [7, 8], ids [9] -> (-2, 7), (-1, 8), (0, 9)
        for index, token in enumerate([*before[-CONTEXT:], *ids], start=-len(before[-CONTEXT:])):
            alone = token in self.special or self._backend.id_to_token(token) is None
            if not alone:
                run.append(token)
                new = self._added(run, done)
                # A text that ends with U+FFFD waits for more bytes: 226 -> "\ufffd", 226 130 172 -> "\u20ac"
                if not new.endswith(_REPLACEMENT) or len(run) - done > _MAX_PENDING:
                    if index >= 0 and new:
                        yield _DecodedToken(index, new)
                    run = run[done:]
                    done = len(run)
                continue
            if index > 0 and (new := self._added(run, done)):
                yield _DecodedToken(index - 1, new)
            is_special = token in self.special
            # The special id stays as context, because decoders strip the blank of a word that nothing precedes.
            run = [token] if is_special else []
            done = len(run)
            if index >= 0:
                text = self._text([token]) if is_special else f"<unknown id {token}>"
                yield _DecodedToken(index, text, is_special, not is_special)
        if ids and (new := self._added(run, done)):
            yield _DecodedToken(len(ids) - 1, new)

    def _added(self, run: list[int], done: int) -> str:
        """Return the text of `run` after the text of its first `done` ids."""
        if len(run) == done:
            return ""
        text, before = self._text(run), self._text(run[:done])
        # If the new ids change the text before them, there is no text to cut off: take the last character.
        return text[len(before) :] if text.startswith(before) else text[-1:]

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))
