"""Formats whose records only place fields, each with the line of `--columns` that reads it (`readers.columns`).

    messages=traj                                                      a conversation
    prompt=input,answer=output                                         text as it was sent to the model, and its answer
    prompt=input.messages,chosen=preferred,rejected=other,tools=input.tools?        a pair of answers

`requires` of the format guarantees the kinds of the values. An ignored field is one that the format lists as dropped.
All other fields describe the rollout by their own names (`rollout_facts`). The format `columns` itself has the lines
that a user gives, or that many data sets share.
"""

from __future__ import annotations

from dataclasses import replace

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    conversation,
    describe,
)
from treepack.ingest.column_map import column_map
from treepack.ingest.readers.column_records import read_columns
from treepack.ingest.readers.columns.aliases import matches
from treepack.ingest.readers.fields.field_paths import MISSING, value_at
from treepack.ingest.readers.format import ReadRecord
from treepack.ingest.readers.messages.sft_messages import read_pair
from treepack.trajectory import PromptCompletion

# Counted once per record, so that a user notices that a better source may exist.
_DECODED_NOTE = "text of verl's dump, decoded without special tokens"


def _by_columns(line: str, *, notes: tuple[str, ...] = ()) -> ReadRecord:
    """Return the function that reads records by the columns of `line`; each trajectory of text has the `notes`."""
    columns = column_map(line)
    used = {str(path.steps[0]) for paths in (*columns.paths.values(), columns.ignore) for path in paths}
    steps = {key: path.steps for key, (path,) in columns.paths.items()}

    def read(record: Record, options: ReadOptions) -> Outcomes:
        values = {key: value_at(record.value, each) for key, each in steps.items()}
        found: JsonObject = {key: None if value is MISSING else value for key, value in values.items()}
        if "messages" in found:
            yield conversation(record, found["messages"], options, used=used)
        elif "chosen" in found:
            # `read_pair` reads the tools from the record itself.
            record = replace(record, value=record.value | {"tools": found["tools"] or None})
            yield from read_pair(record, found["prompt"], found["chosen"], found["rejected"], options, used=used)
        elif found["answer"]:
            content = PromptCompletion(found["prompt"], found["answer"])
            yield describe(record, content, used=used, options=options, notes=notes)
        else:
            # An empty answer has no token to train.
            yield Skipped(record.source, "empty response")

    return read


FORMATS = (
    # Historical trajectories of tau-bench, one per task and trial. The log contains no schemas of tools; the
    # tokenisation has an option for them.
    Format(
        name="tau-bench",
        rank=10,
        program="tau-bench",
        recognised_by="`task_id` and `traj`, a list of messages",
        requires="task_id, traj:objects",
        used="task_id trial reward info traj!",
        keeps="rewards, lineage",
        read=_by_columns("messages=traj"),
    ),
    # Text that verl's trainer writes next to its metrics: `<step>.jsonl` of `rollout_data_dir`. Both texts were decoded
    # from ids without their special tokens. The ends of turns are lost, so neither the ids nor the text that the model
    # saw can be restored, and in the output of an agent, the text of tools cannot be separated from the text of the
    # model. If the exact ids were kept, read those instead. Without a `step`, the name of the file is the step.
    Format(
        name="verl-dump",
        rank=270,
        program="verl (rollout_data_dir, validation_data_dir)",
        recognised_by="`input` and `output` as text beside `score` and `step` or `gts`",
        requires="input:text, output:text, score, step|gts",
        used="input output gts score step",
        keeps="rewards",
        read=_by_columns("prompt=input,answer=output", notes=(_DECODED_NOTE,)),
    ),
    # Fine-tuning data of OpenAI for preferences: a conversation and two answers to it. The common prompt is not
    # trained. OpenAI's data for supervised fine-tuning is in the format `chat`.
    Format(
        name="openai-preference",
        rank=330,
        program="OpenAI fine-tuning (preferences)",
        recognised_by="`input.messages`, `preferred_output` and `non_preferred_output`",
        requires="input.messages:objects, preferred_output:objects, non_preferred_output:objects",
        used="input.messages input.tools preferred_output non_preferred_output",
        dropped="input.parallel_tool_calls",
        keeps="rewards",
        read=_by_columns(
            "prompt=input.messages,chosen=preferred_output,rejected=non_preferred_output,tools=input.tools?"
        ),
    ),
    # Text that SkyRL writes for its evaluations, one file per data set in `dumped_evals`. Both texts were decoded from
    # ids with their special tokens. In the response of an agent, the text of tools cannot be separated from the text of
    # the model, so all of it is trained.
    Format(
        name="skyrl-dump",
        rank=420,
        program="SkyRL (evaluation dumps)",
        recognised_by="`input_prompt` and `output_response` as text",
        requires="input_prompt:text, output_response:text",
        used="input_prompt output_response score stop_reason env_class data_source",
        dropped="env_extras",
        keeps="rewards",
        read=_by_columns("prompt=input_prompt,answer=output_response,ignore=env_extras"),
    ),
    Format(
        name="columns",
        rank=640,
        program="homemade layouts: `--columns`, and usual names such as `prompt` and `response`",
        recognised_by="`--columns`, or the names in a row of [other layouts](inputs.md#other-layouts)",
        requires=matches,
        checked="none",
        used="""
            id group_id uid prompt response responses rewards instruction input context question answer query
            conversation trajectory dialog prompt_tokens response_tokens prompt_idx reward score step advantage
        """,
        keeps="token ids, masks, rewards, lineage",
        notes_unused=False,
        read=read_columns,
    ),
)
