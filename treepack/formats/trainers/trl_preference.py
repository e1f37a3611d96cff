"""Preference pairs of TRL, as messages or as text: two trajectories that form a group, with rewards 1 and 0.

    {"prompt": P, "chosen": C, "rejected": R}       P C [trained C], reward 1      P R [trained R], reward 0
    {"chosen": P C, "rejected": P R}                the same; the common beginning of both is the prompt, to the
                                                    begin of the last turn of text, or to the end of a word

`treepack train --loss dpo` compares the trajectories of a group whose rewards differ, so each pair is a group, even if
several pairs have the same prompt. If the prompt is text and the completions are messages, the prompt is ignored,
because the messages begin with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treepack.calls.apis.request_answer import answer_messages, texts_of
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
    is_empty,
    is_messages,
    read_chat,
    shown,
    without,
)
from treepack.ingest.readers.fields.endings import FLAG, REASON, kind_of
from treepack.ingest.readers.messages.normal_form import has_media

# The rewards of the two sides: only their order matters to the loss.
_SIDES = {"chosen": 1.0, "rejected": 0.0}


# Beginnings of turns in texts: of the model, or of the user.
_TURN = re.compile(
    r"(?P<model>\n\s*assistant:|<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n*"
    r"|<\|assistant\|>\n?|### (?:response|assistant):\n?|\[/INST\])"
    r"|\n\s*(?:human|user):|<\|im_start\|>user|<\|start_header_id\|>user|<\|user\|>|### (?:instruction|human):"
    r"|\[INST\]",
    re.IGNORECASE,
)


def _read_trl_preference(record: Record, options: ReadOptions) -> Outcomes:
    """Read the two trajectories of `record`, `<id>/chosen` and `<id>/rejected`, in a group named after the record.

    Raises:
        TreepackError: a prompt of a different form than the completions, or an error of the `chat` reader.
    """
    value = record.value
    prompt, chosen, rejected = _parts(value, record.source)
    if has_media(value):
        yield Skipped(record.source, MEDIA_REASON)
        return
    if chosen == rejected:
        yield Skipped(record.source, "chosen and rejected are the same")
        return
    if not is_empty(value.get("completion")) and value["completion"] not in (value["chosen"], value["rejected"]):
        raise TreepackError(
            f"{record.source}: has a completion beside chosen and rejected; leave it out with "
            "--columns ignore=completion"
        )
    told = set[str]()
    notes_on_messages = _notes_on_messages(value, prompt, (chosen, rejected), record.source)
    for completion, (side, reward) in zip((chosen, rejected), _SIDES.items(), strict=True):
        rest = without(value, {*_SIDES, "messages"})
        one = replace(record, value=_of_side(rest, side) | {"prompt": prompt, "completion": completion})
        for item in read_chat(one, options):
            if not isinstance(item, Trajectory):
                yield item
                continue
            # A note on the prompt concerns both sides and is counted once.
            name = f"{item.trajectory_id}/{side}"
            notes = tuple(note for note in (*item.notes, *notes_on_messages) if note not in told)
            told.update(notes)
            yield replace(item, trajectory_id=name, group_id=record.source, reward=reward, notes=notes)


def _of_side(rest: JsonObject, side: str) -> JsonObject:
    """Return `rest` with the end of the answer of one side: {"chosen_finish_reason": "length"} -> finish_reason."""
    ends = {name: name.removeprefix(f"{side}_") for name in rest if name.startswith(f"{side}_")}
    return rest | {short: rest[name] for name, short in ends.items() if kind_of(short) in (REASON, FLAG)}


def _notes_on_messages(value: JsonObject, prompt: Any, sides: Sequence[Any], source: str) -> tuple[str, ...]:
    """Return a note if the record has `messages` too, which repeat the prompt or one side in the copies of a data set.

    Raises:
        TreepackError: they contain something else.
    """
    messages = value.get("messages")
    if is_empty(messages):
        return ()
    wholes = [
        prompt,
        *sides,
        *([*prompt, *side] for side in sides if isinstance(prompt, list) and isinstance(side, list)),
    ]
    said = ["\n".join(texts_of(whole)) for whole in wholes]
    texts = texts_of(messages)
    if not is_messages(messages) or not any(all(text.strip() in whole for text in texts) for whole in said):
        raise TreepackError(
            f"{source}: messages are neither the prompt nor the chosen or rejected answer; leave them out with "
            "--columns ignore=messages"
        )
    return ("field 'messages' not used, because the prompt and the answers contain it",)


def _parts(value: JsonObject, source: str) -> tuple[Any, Any, Any]:
    """Return the prompt and the two completions.

    If there is no prompt in the form of the completions, the prompt is the common beginning of the completions.
    """
    prompt, chosen, rejected = value.get("prompt"), value["chosen"], value["rejected"]
    # Messages that end with a question, next to two answers, are the prompt.
    messages = value["messages"] if is_messages(value.get("messages")) else []
    is_question = bool(messages) and messages[-1].get("role") == "user"
    if prompt is None and is_question and chosen[: len(messages)] != messages:
        prompt, chosen, rejected = messages, answer_messages(chosen), answer_messages(rejected)
    if prompt is not None and not isinstance(prompt, str) and not is_messages(prompt):
        raise TreepackError(f"{source}: prompt is {shown(prompt)}; expected messages or text")
    if isinstance(prompt, type(chosen)):
        return prompt, chosen, rejected
    if isinstance(prompt, list):
        raise TreepackError(f"{source}: prompt is messages, but the completions are text; give both in one form")
    num = _num_common(chosen, rejected)
    if isinstance(chosen, str):
        num = _start_of_answer(chosen, rejected, num)
    return chosen[:num], chosen[num:], rejected[num:]


def _start_of_answer(chosen: str, rejected: str, num: int) -> int:
    """Return the start of the answers in two texts of which the first `num` characters are equal."""
    # "Human: Hi\n\nAssistant: I do" and "..: I did" -> the prompt ends with "Assistant:"
    marks = list(_TURN.finditer(chosen, 0, num))
    if marks and marks[-1]["model"]:
        return marks[-1].end()
    # "The sky is blue" and "The sky is black" -> prompt "The sky is", completions " blue" and " black"
    inside = chosen[num - 1 : num].isalnum() and (chosen[num : num + 1] + rejected[num : num + 1])[:1].isalnum()
    before = chosen[:num].rfind(" ") if inside else -1
    if before >= 0 and chosen[before:num].strip().isalnum():
        return before
    return num - 1 if chosen[num - 1 : num] == " " else num  # a word's first token holds the space before it


def _num_common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Count the messages, or characters, that both begin with."""
    pairs = list(zip(chosen, rejected, strict=False))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))


FORMAT = Format(
    name="trl-preference",
    rank=340,
    program="TRL (preference datasets: DPO, reward modelling)",
    recognised_by="`chosen` and `rejected`, both as messages or both as text",
    # A pair next to a question is another layout; without it, the common beginning of both texts is the prompt.
    requires="""
        prompt:set, chosen:text, rejected:text;
        chosen:text, rejected:text, question:!text, query:!text, input:!text, problem:!text;
        chosen:objects, rejected:objects
    """,
    used="prompt chosen rejected tools chat_template_kwargs id",
    keeps="masks, rewards, lineage",
    read=_read_trl_preference,
)
