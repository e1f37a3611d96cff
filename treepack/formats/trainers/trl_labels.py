"""Labelled completions of TRL: one label for the completion (KTO), or one for each step (process reward models).

    {"prompt": P, "completion": C, "label": true}                         reward 1, or 0 if the label is false
    {"prompt": "..", "completions": ["..", ".."], "labels": [true, false]}   reward 1 if all steps are right, else 0

Line feeds join the steps into one completion, as in TRL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treepack.formats.kit import (
    Format,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    as_flag,
    read_chat,
    shown,
    without,
)
from treepack.ingest.readers.messages.sft_messages import LABELS

_STEP_SEPARATOR = "\n"
STEPS_NOTE = "labels of steps read as one reward"


def _read_trl_labels(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one trajectory of `record`.

    Raises:
        TreepackError: labels that do not fit the steps, or an error of the `chat` reader.
    """
    value, source = record.value, record.source
    rest = without(value, (*LABELS, "completions", "labels"))
    notes: tuple[str, ...] = ()
    flag = next((each for name in LABELS if (each := as_flag(value.get(name))) is not None), None)
    if flag is not None:
        reward = float(flag)
    else:
        # One wrong step makes the whole solution wrong.
        right = _labels(value["labels"], len(value["completions"]), source)
        # ["2 + 2", "= 4"] -> "2 + 2\n= 4"
        rest["completion"] = _STEP_SEPARATOR.join(value["completions"])
        reward, notes = float(all(right)), (STEPS_NOTE,)
        if not value["completions"]:
            yield Skipped(source, "empty response")
            return
    for item in read_chat(replace(record, value=rest), options):
        yield item if isinstance(item, Skipped) else replace(item, reward=reward, notes=item.notes + notes)


def _labels(labels: Any, num_steps: int, source: str) -> list[bool]:
    # Parquet gives an array of booleans, JSON a list.
    flags = list(labels) if hasattr(labels, "__len__") and not isinstance(labels, str | dict) else None
    if flags is None or not all(label in (0, 1) for label in flags) or len(flags) != num_steps:
        raise TreepackError(
            f"{source}: labels is {shown(labels)}; expected true or false for each of {num_steps} steps"
        )
    return [bool(label) for label in flags]


FORMAT = Format(
    name="trl-labels",
    rank=350,
    program="TRL (unpaired preferences, stepwise supervision)",
    recognised_by="`prompt` and `completion` beside a `label` that is true or false, or `prompt` and `completions` "
    "beside `labels`",
    requires="""
        prompt:talk, completion:talk, label|kto_tag:flag;
        prompt:talk, completions:texts, labels, label:!flag
    """,
    used="prompt completion label kto_tag completions labels",
    dropped="which step is labelled wrong",
    keeps="masks, rewards",
    read=_read_trl_labels,
)
