"""Files of the sub-agents of a session: a session and its sub-agents are one rollout.

    Claude Code    S.jsonl   S/subagents/agent-a1.jsonl, or agent-a1.jsonl next to it if S.jsonl names a1
    Codex          rollout-<time>-S.jsonl, and in the same folder the files that name S as the thread that spawned them

The rollout is named after the session, its source is the file of the session, and its group comes from the first prompt
of the session. The parts of the session come first, and then the parts of each sub-agent, by the name of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from treepack.calls.rollout_names import group_of_first, within
from treepack.errors import TreepackError
from treepack.files.input_files.companion_files import is_file
from treepack.files.input_files.inputs import STDIN
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.trajectory import Outcome, Outcomes, Trajectory

_AGENT_FILES = "agent-*.jsonl*"  # of Claude Code


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A file of a session with sub-agents: name and file of the session, and the number of its part, 0 for its own.

    `agent` is the kind of the sub-agent whose file it is, if the session has it.
    """

    session: str
    path: str
    number: int
    agent: str | None = None


def agents_below(session_path: str, session: str) -> list[str]:
    """Return the names of the files of sub-agents in the folder of a session of Claude Code."""
    return sorted(each.name for each in (Path(session_path).parent / session / "subagents").glob(_AGENT_FILES))


def agents_beside(session_path: str, agents: Iterable[str]) -> list[str]:
    """Return the names of the files of sub-agents with these ids next to the file of a session of Claude Code."""
    folder = Path(session_path).parent
    return sorted(name for name in {f"agent-{agent}.jsonl" for agent in agents} if is_file(folder / name))


def file_of_session(path: str, session: str) -> str | None:
    """Return the path of the session of the sub-agent whose file is `path`, in Claude Code; None if it is not there."""
    folder = Path(path).parent
    home = folder.parent.parent if folder.name == "subagents" and folder.parent.name == session else folder
    found = home / f"{session}.jsonl"
    return str(found) if path != STDIN and is_file(found) else None


def first_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file of the session up to the first damaged one, which the reader of the file reports."""
    try:
        yield from read_records(str(path))
    except TreepackError:
        return


def in_session(items: Iterable[Outcome], file: SessionFile | None, group: str | None = None) -> Outcomes:
    """Yield `items` as parts of their session, in its `group`, by default that of the first of them."""
    for item in items:
        if file is None or not isinstance(item, Trajectory):
            yield item
            continue
        group = group or item.group_id or group_of_first(item)
        part = within(item, file.session, file.number)
        yield replace(part, source=file.path, group_id=group) if isinstance(part, Trajectory) else part
