"""tau-bench's historical trajectories: `{task_id, trial, reward, info, traj: [messages]}`, one per task and trial.

The log holds no tool schemas; they are given when the conversation is tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.about import LINEAGE, REWARDS, About
from treepack.ingest.readers.fields import ReadOptions, describe
from treepack.ingest.readers.messages import is_messages, normalise_messages
from treepack.ingest.readers.records import Record
from treepack.trajectory import Chat, Skipped, Trajectory

ABOUT = About(
    program="tau-bench",
    recognised_by="`task_id` and `traj`, a list of messages",
    used=("task_id", "trial", "reward", "info", "traj"),
    keeps=frozenset({REWARDS, LINEAGE}),
)


def matches(record: dict[str, Any]) -> bool:
    """Whether `record` has a `task_id` and a `traj` of messages."""
    return "task_id" in record and is_messages(record.get("traj"))


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The one trajectory of `record`, called `<task_id>/<trial>`, in the group of its task."""
    if not matches(record.value):
        raise TreepackError(f"{record.source}: has no task_id or no traj; expected a record of tau-bench")
    done = normalise_messages(record.value["traj"], source=record.source)
    yield describe(record, Chat(done.messages, done.weights), used={"traj"}, options=options, notes=done.notes)
