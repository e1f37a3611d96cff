"""The time at which a call started, in the forms that exporters write: text, a number, or a time of a table."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import shown


def start_time(value: dict[str, Any], *names: str, source: str) -> int | float | str | None:
    """Return the first of the fields `names` of a call that is set, None without one.

    Raises:
        TreepackError: it is neither text nor a number.
    """
    field, start = next(((name, value[name]) for name in names if value.get(name)), ("", None))
    start = start.isoformat() if isinstance(start, datetime) else start
    if isinstance(start, bool) or not isinstance(start, int | float | str | None):
        raise TreepackError(f"{source}: {field} is {shown(start)}; expected a time")
    return start
