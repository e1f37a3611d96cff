"""Files `results.jsonl` of MINT: one rollout of a task per line.

    {"state": {"history": [{"role", "content"}, ..], "success": true, "terminate_reason": "task_success", ..},
     "task": {"task_name": "gsm8k", "task_id": 7, "prompt": "..", "reference": ".."}}

The reward is 1 if the task was solved, and 0 if it was not. `task_id` is the number of a task in one data set, and the
folder of the file has the name of the data set. The name in `task` is the name of a family of data sets.
"""

from __future__ import annotations

from dataclasses import replace

from treepack.files.input_files.records import folder_and_stem
from treepack.formats.kit import (
    Format,
    Outcomes,
    ReadOptions,
    Record,
    TreepackError,
    conversation,
    shown,
    without,
)


def read_mint(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of `record`, named `<group>/<file>:<line>`, in the group `<folder>/<task_id>`.

    Raises:
        TreepackError: `success` is not a boolean.
    """
    # `requires` guarantees both objects.
    state, task = record.value["state"], record.value["task"]
    # gsm8k/results.jsonl and task_id 7 -> group "gsm8k/7"
    folder = folder_and_stem(record)[0] or str(task.get("task_name"))
    group = None if task.get("task_id") is None else f"{folder}/{task['task_id']}"
    # null means that the task was not judged.
    success = state.get("success")
    if not isinstance(success, bool | None):
        raise TreepackError(f"{record.source}: state.success is {shown(success)}; expected true or false")
    # Only the outcome of `state` and the name in `task` are short metadata.
    value = {
        **without(record.value, ("state", "task")),
        "trajectory_id": record.label if group is None else f"{group}/{record.label}",
        "group_id": group,
        "task_name": task.get("task_name"),
        "reward": None if success is None else float(success),
        "terminate_reason": state.get("terminate_reason"),
        "error": state.get("error"),
    }
    yield conversation(replace(record, value=value), state["history"], options)


FORMAT = Format(
    name="mint",
    rank=80,
    program="MINT",
    recognised_by="`state.history`, a list of messages, and `task`",
    requires="state.history:objects, task:object",
    used="""
        state.history state.success state.terminate_reason state.error task.task_id task.task_name
    """,
    dropped="""
        task.prompt (part of the history);
        task.reference (no model saw it);
        task.metadata;
        state.finished, state.latest_output, state.agent_action_count, state.token_counter (follow from the history)
    """,
    keeps="rewards, lineage",
    failed="error terminate_reason",
    read=read_mint,
)
