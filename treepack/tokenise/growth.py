"""How much longer the rules of a tokenizer can make a text: a chain of replacements could fill the memory.

    Replace "." by "xxxxxxxxxx", nine times in a row    a text of n characters -> up to n * 10**9

The file of a tokenizer may come from anybody, so its rules are measured before the first text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from treepack.errors import TreepackError

# XLNet's rules, which are the longest in use, reach 18 * 18 * 2: compatibility forms twice, and a rule about spaces.
_MAX_GROWTH = 1000
# U+FDFA becomes 18 letters in the compatibility forms; a byte outside of ASCII becomes two in ByteLevel.
_GROWTH = {"NFKC": 18, "NFKD": 18, "ByteLevel": 2, "BertNormalizer": 3, "BertPreTokenizer": 1}


def check_growth(tokenizer: Any, name: str) -> None:
    """Refuse a fast tokenizer whose rules can make a text more than `_MAX_GROWTH` times longer.

    Raises:
        TreepackError: they can.
    """
    backend = tokenizer.backend_tokenizer
    for parts in ((backend.normalizer, backend.pre_tokenizer), (backend.decoder,)):
        growth = 1
        for rule in (rule for part in parts for rule in _rules(part)):
            growth *= _growth(rule)
        if growth > _MAX_GROWTH:
            raise TreepackError(
                f"{name}: the rules of its tokenizer.json can make a text more than {_MAX_GROWTH} times longer, which "
                "may fill the memory; use the tokenizer that came with the model"
            )


def _rules(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the rules of a part of a tokenizer in their order, also within sequences."""
    pending = [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        rule = pending.pop()
        inner = [each for value in rule.values() if isinstance(value, list) for each in value if isinstance(each, dict)]
        if inner:
            pending.extend(reversed(inner))
        else:
            yield rule


def _growth(rule: dict[str, Any]) -> int:
    """Return by how much a rule can make a text longer, at least 1."""
    if rule.get("type") == "Replace":
        shortest = len(rule["pattern"].get("String", ""))  # a regular expression may match the empty text
        return max(1, -(-len(rule["content"]) // shortest)) if shortest else len(rule["content"]) + 1
    if rule.get("type") == "Prepend":  # before each piece of a text, which may have one character
        return 1 + len(rule["prepend"])
    if rule.get("type") == "Precompiled":
        # The size of a trie, the trie, then the texts that it leads to, with a zero after each.
        table = base64.b64decode(rule["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
    return _GROWTH.get(str(rule.get("type")), 1)
