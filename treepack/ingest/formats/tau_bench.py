"""Historical trajectories of tau-bench: `{task_id, trial, reward, info, traj: [messages]}`, one per task and trial.

The log contains no tool schemas. They are an option of the tokenisation.
"""

from __future__ import annotations

from collections.abc import Iterator

from treepack.ingest.readers.calls.conversations import conversation
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.files.records import Record
from treepack.ingest.readers.format import LINEAGE, REWARDS, Format
from treepack.ingest.readers.kinds import ANY, OBJECTS
from treepack.trajectory import Skipped, Trajectory


def read_tau_bench(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the one trajectory of `record`, named `<task_id>/<trial>`, in the group of its task."""
    # The reward, the task and the trial have names that `describe` reads.
    yield conversation(record, record.value["traj"], options, used={"traj"})


FORMAT = Format(
    name="tau-bench",
    rank=10,
    program="tau-bench",
    recognised_by="`task_id` and `traj`, a list of messages",
    requires=[{"task_id": ANY, "traj": OBJECTS}],
    used="task_id trial reward info traj!".split(),
    keeps={REWARDS, LINEAGE},
    read=read_tau_bench,
)
