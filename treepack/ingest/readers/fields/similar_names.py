"""Names of fields that are probably misspelled names of known fields."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

SIMILAR = 0.8  # share of equal characters above which a name may be misspelled


def close_names(value: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the names of fields in `value` that are nearly one of `names`: mesages for messages."""
    return [field for field in value if field not in names and difflib.get_close_matches(field, names, 1, SIMILAR)]
