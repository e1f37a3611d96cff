"""Files of Codex that belong together: sessions and their sub-agents, and forks of sessions.

    rollout-<time>-S.jsonl   session S
    rollout-<time>-T.jsonl   spawned by S: a part of the rollout S
    rollout-<time>-U.jsonl   forked from S, by the user or for a sub-agent: begins with a copy of the history of S

Files of one folder are compared by the first line of each. A copied turn is trained only in the file of its session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from treepack.calls.session_files import SessionFile, first_records
from treepack.files.input_files.inputs import STDIN

_FILES = "rollout-*.jsonl*"


@dataclass(frozen=True, slots=True)
class _CodexThread:
    """A file of a folder: its path, its number in the order of names, and the thread that spawned it."""

    path: str
    number: int
    spawned_by: str | None


def file_of_thread(path: str, meta: dict[str, Any]) -> SessionFile | None:
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


def copied_items(rows: Sequence[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Return the first items of the session with these `rows` that it has copied from the one it was forked from.

    The copy may omit items, and the new session may add messages of the user to it; it ends at the first item of the
    model that the other session does not have.
    """
    # A copied history begins with the `session_meta` of its own session.
    payloads = (row.get("payload") for row in rows if row.get("type") == "session_meta")
    metas = [payload for payload in payloads if isinstance(payload, dict)]
    threads = _threads_beside(path)
    parents = (metas[0].get("forked_from_id"), *(meta.get("id") for meta in metas[1:]))
    parent = next((name for name in parents if name is not None), None)
    if not isinstance(parent, str) or parent not in threads or threads[parent].path == path:
        return []
    # Items a u b c, in which the user wrote u, and a b d of the other session: a and b are copied, c ends the copy.
    remaining = list(_items(record.value for record in first_records(Path(threads[parent].path))))
    copied: list[dict[str, Any]] = []
    for item in _items(rows):
        if item in remaining:
            remaining = remaining[remaining.index(item) + 1 :]
            copied.append(item)
        elif _is_of_model(item):
            break
    return copied


def _items(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    payloads = (row.get("payload") for row in rows if row.get("type") == "response_item")
    return (payload for payload in payloads if isinstance(payload, dict))


def _is_of_model(item: dict[str, Any]) -> bool:
    kind = str(item.get("type"))
    return item.get("role") == "assistant" if kind == "message" else not kind.endswith("_output")


def _spawned_by(meta: dict[str, Any]) -> str | None:
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
