"""Turns that several files or records have: sessions that were copied or forked, and exports that overlap.

is_copy([("u1", line)], turns, "b.jsonl")    True if turns has the line "u1" with this content from "a.jsonl"
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from treepack.calls.conversations import with_notes
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.trajectory import Outcomes, Skipped

COPIED_NOTE = "turns that were copied from another session not trained"
CopiedLine = tuple[Any, Any]  # the id of a line, and its content
_ReadCalls = Callable[[Record, Sequence[Any], ReadOptions], Outcomes]


def is_copy(lines: Iterable[CopiedLine], turns: dict[str, str] | None, path: str) -> bool:
    """Return whether another place than `path` has one of the `lines` of a turn: the same content under the same id.

    A line that no place has is kept in `turns` as one of `path`. Without an id, it is never a copy.
    """
    texts = [json.dumps(line, sort_keys=True, default=str) for line in lines if line[0] is not None]
    keys = [hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest() for text in texts]
    places = [] if turns is None else [turns.setdefault(key, path) for key in keys]
    return any(place != path for place in places)


def once(read: _ReadCalls) -> _ReadCalls:
    """Return `read` without repeated calls: an earlier one has the same `name`, end of the prompt and response."""

    @wraps(read)
    def read_new(record: Record, calls: Sequence[Any], options: ReadOptions) -> Outcomes:
        lines = [(call.name or None, (_end_of(call.prompt), call.response)) for call in calls]
        new = [call for k, call in enumerate(calls) if not is_copy([lines[k]], options.turns, f"{record.source} {k}")]
        if calls and not new:
            yield Skipped(record.source, COPIED_NOTE)
            return
        yield from with_notes(read(record, new, options), (COPIED_NOTE,) if len(new) < len(calls) else ())

    return read_new


def _end_of(prompt: Any) -> Any:
    # Two calls of made-up names such as "1" may have the same response to different prompts.
    return prompt[-1:] if isinstance(prompt, list | tuple) else None
