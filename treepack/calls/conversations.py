"""Steps that many readers share: the rest of a record, one conversation as a trajectory, notes on the first one."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe
from treepack.ingest.readers.fields.values import JsonObject
from treepack.ingest.readers.messages.content_blocks import split_blocks
from treepack.ingest.readers.messages.conversation_settings import normalise_tools
from treepack.ingest.readers.messages.normal_form import normalise_messages
from treepack.ingest.readers.messages.prefills import with_prefills
from treepack.trajectory import Outcome, Outcomes, Trajectory


def without(value: JsonObject, names: Container[object]) -> JsonObject:
    """Return the fields of `value` that are not in `names`, in their order."""
    return {name: field for name, field in value.items() if name not in names}


def conversation(
    record: Record,
    messages: Sequence[JsonObject],
    options: ReadOptions,
    *,
    used: Collection[str] = (),
    tools: Any = None,
    num_prompt: int = 0,
    notes: tuple[str, ...] = (),
) -> Trajectory:
    """Return the trajectory of one conversation, whose first `num_prompt` messages are not trained.

    `record` describes the rollout, except for its fields `used`. `tools` are schemas.

    Raises:
        TreepackError: messages or tools that `readers.messages` refuses.
    """
    prompt, answers = split_blocks(messages[:num_prompt]), split_blocks(messages[num_prompt:])
    listed, num_prompt = with_prefills([*prompt, *answers], len(prompt))
    done = normalise_messages(listed, source=record.source)
    content = done.chat(num_prompt, normalise_tools(tools, source=record.source))
    return describe(record, content, used=used, options=options, notes=done.notes + notes)


def with_notes(items: Iterable[Outcome], notes: tuple[str, ...]) -> Outcomes:
    """Yield `items` with `notes` added to the first trajectory only, so that a note on a rollout is counted once."""
    for item in items:
        if isinstance(item, Trajectory):
            item = replace(item, notes=item.notes + notes)
            # The note is on the first trajectory now.
            notes = ()
        yield item
