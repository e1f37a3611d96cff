"""Data sets of verl: conversations for supervised training, prompts for RL, and responses generated to such prompts.

    {"messages": [..], "tools": [..], "enable_thinking": true}
    {"data_source": "..", "prompt": [..], "reward_model": {"ground_truth": ".."}}
    {the same, "responses": ["..", ".."]}

All assistant turns of a conversation are trained. Each generated response is a trajectory, and is trained. A prompt
without a response trains nothing and is skipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treepack.formats.kit import (
    MEDIA_REASON,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    Trajectory,
    TreepackError,
    as_text,
    is_messages,
    read_chat,
    shown,
    without,
)
from treepack.ingest.readers.messages.normal_form import MEDIA, has_media


def _read_verl_data(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`; a generated response is named `<record>/response-<k>`, counted from 1.

    Raises:
        TreepackError: fields of a different kind, or messages that the `chat` reader refuses.
    """
    value = record.value
    if has_media(value):
        yield Skipped(record.source, MEDIA_REASON)
        return
    rest = without(value, MEDIA)
    if is_messages(value.get("messages")):
        yield from read_chat(replace(record, value=_with_thinking(rest, record)), options)
        return
    responses = _list(value.get("responses") or [], "responses", record)
    # A data set of prompts is an input of RL, not of a trie.
    if not responses:
        yield Skipped(record.source, "prompt without a response", is_rollout=False)
        return
    # The ground truth is text that no model saw; it is kept as metadata.
    model = rest.pop("reward_model")
    rest = without(rest, {"responses"})
    rest["ground_truth"] = model.get("ground_truth")
    for number, response in enumerate(responses, 1):
        text = as_text(response, source=record.source, name="a response")
        completion = [{"role": "assistant", "content": text}]
        one = replace(record, value=rest | {"completion": completion})
        for item in read_chat(one, options):
            yield _number_response(item, number) if isinstance(item, Trajectory) else item


def _with_thinking(value: JsonObject, record: Record) -> JsonObject:
    thinking = value.pop("enable_thinking", None)
    if thinking is None:
        return value
    if not isinstance(thinking, bool):
        raise TreepackError(f"{record.source}: enable_thinking is {shown(thinking)}; expected true or false")
    # {"enable_thinking": true} is a variable of the chat template, not a field of the rollout.
    variables = value.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        return value  # the reader of chats refuses it
    return value | {"chat_template_kwargs": variables | {"enable_thinking": thinking}}


def _number_response(item: Trajectory, number: int) -> Trajectory:
    """Return the `number`-th response of a record. Only the first keeps the notes, so that they are counted once."""
    notes = item.notes if number == 1 else ()
    return replace(item, trajectory_id=f"{item.trajectory_id}/response-{number}", notes=notes)


def _list(value: Any, name: str, record: Record) -> list[Any]:
    if not isinstance(value, list):
        raise TreepackError(f"{record.source}: {name} is {shown(value)}; expected a list")
    return value


FORMAT = Format(
    name="verl-data",
    rank=280,
    program="verl (SFT and RL datasets, generated responses)",
    recognised_by="`messages` beside `enable_thinking`, or `prompt` as messages beside `reward_model`",
    requires="messages:objects, enable_thinking; prompt:objects, reward_model:object",
    used="""
        messages tools enable_thinking prompt responses data_source ability extra_info reward_model.ground_truth
    """,
    dropped="images and videos (records that have some are skipped)",
    read=_read_verl_data,
)
