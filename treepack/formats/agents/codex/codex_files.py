"""Files of Codex that belong together: sessions and their sub-agents.

    rollout-<time>-S.jsonl   session S
    rollout-<time>-T.jsonl   spawned by S: a part of the rollout S

Files of one folder are compared by the first line of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from treepack.calls.session_files import SessionFile, first_records
from treepack.formats.kit import STDIN, JsonObject

_FILES = "rollout-*.jsonl*"


@dataclass(frozen=True, slots=True)
class _CodexThread:
    """A file of a folder: its path, its number in the order of names, and the thread that spawned it."""

    path: str
    number: int
    spawned_by: str | None


def file_of_thread(path: str, meta: JsonObject) -> SessionFile | None:
    """Return the file of a session with sub-agents, or of one of them, by its `session_meta`; None for any other."""
    threads, thread = _threads_beside(path), str(meta.get("id"))
    root, above, seen = thread, _spawned_by(meta), {thread}
    while above is not None and above in threads and above not in seen:
        root, above = above, threads[above].spawned_by
        seen.add(root)
    if root != thread:
        own = threads.get(thread)
        return SessionFile(root, threads[root].path, 1 + (own.number if own is not None else len(threads)))
    is_parent = any(each.spawned_by == thread for name, each in threads.items() if name != thread)
    return SessionFile(thread, path, 0) if is_parent else None


def _spawned_by(meta: JsonObject) -> str | None:
    """Return the thread that spawned the sub-agent with this `session_meta`; None for a session of the user."""
    value: Any = meta
    for name in ("source", "subagent", "thread_spawn", "parent_thread_id"):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def _threads_beside(path: str) -> dict[str, _CodexThread]:
    folder = Path(path).parent
    return {} if path == STDIN or not folder.is_dir() else _threads(str(folder), folder.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _threads(folder: str, _changed: int) -> dict[str, _CodexThread]:
    """Return the sessions of a folder by their ids. O(files); reads one line of each."""
    threads: dict[str, _CodexThread] = {}
    for number, path in enumerate(sorted(Path(folder).glob(_FILES))):
        for record in islice(first_records(path), 1):
            meta = record.value.get("payload")
            if (
                record.value.get("type") == "session_meta"
                and isinstance(meta, dict)
                and isinstance(meta.get("id"), str)
            ):
                threads.setdefault(meta["id"], _CodexThread(str(path), number, _spawned_by(meta)))
    return threads
