"""Text to token ids by a fast tokenizer, with a cache of the text between special tokens.

"Hi<|end|>Yo"  --split at special tokens-->  "Hi", "<|end|>", "Yo"  --each tokenised or cached-->  ids
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import numpy as np

from treepack.errors import foreign_code
from treepack.tokenise.control_tokens import MARK
from treepack.trajectory import Int32

CACHED_CHARACTERS = 1 << 26  # of text in the cache of an `Encoder`: up to 0.25 GB with the ids, per process


class Encoder:
    """A tokenizer that adds no special tokens, and caches the ids of the text between special tokens.

    The prompts of successive turns repeat nearly everything, so nearly every stretch of text is in the cache. Text is
    split at special tokens only if a probe shows that splitting does not change the ids.
    """

    def __init__(self, tokenizer: Any, *, has_marks: bool = False) -> None:
        """Probe the special tokens of a fast tokenizer of transformers.

        With `has_marks`, a control token with a `MARK` in it becomes ids of ordinary text, without the mark.
        """
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = _splitting_tokens(tokenizer)
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self._special_ids = np.array(special, np.int32)
        self._has_marks = has_marks
        # In an alternation the first match wins: <|end|>x must come before <|end|>.
        longest_first = sorted(self._special, key=lambda token: (-len(token), token))
        # A cut depends on no more characters after its place than these.
        self.longest_separator = max(map(len, longest_first), default=1)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._cache: OrderedDict[str, Int32] = OrderedDict()
        self._cached = 0
        # Llama's tokenizer puts <s> before plain text. Anything else, such as [CLS] ... [SEP], is not a beginning.
        begin = self._backend.encode("", add_special_tokens=True).ids
        is_begin = begin == [tokenizer.bos_token_id]
        self.prefix: Int32 = np.array(begin if is_begin else [], np.int32)
        # One id, which ends a sequence, or none.
        end = tokenizer.eos_token_id
        self.end: Int32 = np.array([] if end is None else [end], np.int32)

    def is_ended(self, text: str) -> bool:
        """Return True if `text` ends with the token that ends a sequence, perhaps with whitespace after it."""
        return len(self.end) > 0 and text.rstrip().endswith(str(self.tokenizer.eos_token))

    def ends_special(self, ids: Int32) -> bool:
        """Return True if the last one of `ids` is a special token."""
        return len(ids) > 0 and bool(np.isin(ids[-1], self._special_ids))

    def encode(self, text: str) -> Int32:
        """Return the ids of `text`, int32; O(length)."""
        ids = [self.encode_stretch(each) for each in self.stretches(text)]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    def stretches(self, text: str) -> list[str]:
        """Cut `text` before and after each special token at which it may be split."""
        # The group in the pattern keeps the separators: "Hi<|end|>Yo" -> ["Hi", "<|end|>", "Yo"].
        parts = [text] if self._pattern is None else self._pattern.split(text)
        return [part for part in parts if part]

    def encode_stretch(self, stretch: str) -> Int32:
        """Return the ids of one of the `stretches` of a text."""
        return self._ids_as_text(stretch) if self._has_marks and MARK in stretch else self._ids(stretch)

    def _ids_as_text(self, stretch: str) -> Int32:
        """Return the ids of a stretch of text in which marks break special tokens."""
        # "a <M|end|>" -> "a <|end|>", tokenised with the special tokens as text. Other added tokens stay broken.
        whole = stretch
        for token in self._special:
            whole = whole.replace(token[0] + MARK + token[1:], token)
        if self._special:
            self._backend.encode_special_tokens = True
            try:
                parts = _encoded(self.tokenizer, whole.split(MARK))
            finally:
                self._backend.encode_special_tokens = False
            ids = np.array([i for part in parts for i in part], np.int32)
            if not np.isin(ids, self._special_ids).any():
                return ids
        # Unknown separators, or a vocabulary that has the token as a word too: each side of a mark alone.
        return np.concatenate([self._ids(part) for part in stretch.split(MARK) if part] or [np.zeros(0, np.int32)])

    def _ids(self, stretch: str) -> Int32:
        if (special := self._special.get(stretch)) is not None:
            return special
        if (cached := self._cache.get(stretch)) is not None:
            self._cache.move_to_end(stretch)  # the stretch with the oldest use stays first
            return cached
        ids = np.array(_encoded(self.tokenizer, [stretch])[0], np.int32)
        self._cache[stretch] = ids
        self._cached += len(stretch)
        while self._cached > CACHED_CHARACTERS:
            oldest, _ = self._cache.popitem(last=False)
            self._cached -= len(oldest)
        return ids


def _splitting_tokens(tokenizer: Any) -> dict[str, Int32]:
    """Return the special tokens at which text may be split before tokenisation, with their ids; none if it may not."""
    special = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Such a token takes whitespace from its neighbours, or matches only in some contexts.
    if any(token.lstrip or token.rstrip or token.normalized or token.single_word for token in special.values()):
        return {}
    # The probes cover a prefix that the tokenizer adds to each text, whitespace on both sides, and an empty text.
    contexts = [("Hello world", "\nnext line"), ("end. \n", " word"), ("", "word")]
    before, after = (_encoded(tokenizer, list(side)) for side in zip(*contexts, strict=True))
    probes = [left + token.content + right for token in special.values() for left, right in contexts]
    expected = [[*left, i, *right] for i in special for left, right in zip(before, after, strict=True)]
    if _encoded(tokenizer, probes) != expected:
        return {}
    return {token.content: np.array([i], np.int32) for i, token in special.items()}


def _encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each of `texts`, without special tokens around it.

    Raises:
        TreepackError: the tokenizer fails; its rules may even make Rust panic.
    """
    with foreign_code(f"{tokenizer.name_or_path}: its tokenizer failed", "use the tokenizer that came with the model"):
        # The method for batches, even for one text: without offsets it needs four fifths of the time.
        found = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [each.ids for each in found]
