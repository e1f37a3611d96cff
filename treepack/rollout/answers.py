"""Tests for an answer in the text of a turn, which ends a path.

answer_test("boxed", tokenizer)                 a closed \\boxed{...}, whose braces are balanced
answer_test("</answer>", tokenizer)             a regular expression, found anywhere in the text
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from treepack.errors import TreepackError
from treepack.trajectory import Int32

_BOXED = "boxed"
_OPENING = "\\boxed{"


def answer_test(pattern: str, tokenizer: Any) -> Callable[[Int32], bool]:
    """Return the function for `TreeOptions.is_answer`: True for token ids whose text contains an answer.

    Args:
        pattern: a regular expression of Python, or "boxed".
        tokenizer: a fast tokenizer; special tokens are part of the text.

    Raises:
        TreepackError: the pattern is not a regular expression.
    """
    backend = tokenizer.backend_tokenizer
    try:
        search: Callable[[str], Any] = has_boxed if pattern == _BOXED else re.compile(pattern).search
    except re.error as error:
        raise TreepackError(
            f"answer is {pattern!r}, which is not a regular expression ({error}); correct it"
        ) from error
    return lambda ids: bool(search(backend.decode(ids.tolist(), skip_special_tokens=False)))


def has_boxed(text: str) -> bool:
    """Return True if `text` contains a closed \\boxed{...}; an escaped brace counts like any other."""
    # "\boxed{\frac{1}{2}}" -> depths 1 2 1 2 1 0: closed; "\boxed{\frac{1}{2}" ends at depth 1.
    start = text.find(_OPENING)
    while start >= 0:
        depth = 1
        for character in text[start + len(_OPENING) :]:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return True
        start = text.find(_OPENING, start + 1)
    return False
