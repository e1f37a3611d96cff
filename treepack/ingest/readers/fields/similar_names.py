"""Names of fields that are nearly the name of another: a misspelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

SIMILAR = 0.8  # share of equal characters above which one name may be a misspelling of another


def close_names(value: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the names of fields in `value` that are nearly one of `names`: mesages for messages."""
    return [field for field in value if field not in names and difflib.get_close_matches(field, names, 1, SIMILAR)]
