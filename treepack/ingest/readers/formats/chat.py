"""Conversations in the message form of OpenAI: `messages`, or TRL's `prompt` and `completion`.

    {"messages": [...], "tools": [...]}                  every assistant message is trained
    {"prompt": [...], "completion": [...]}               every assistant message of the completion is trained
    {"prompt": "text", "completion": "text"}             the completion is trained

A message may have `loss` (ms-swift) or `trainable` (ART, rLLM), which are booleans, and `weight` (OpenAI) or
`loss_scale` (ms-swift), which are numbers >= 0; all of them multiply. A record may have `chat_template_kwargs`, the
variables of the chat template, for example {"enable_thinking": false}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import ReadOptions, describe
from treepack.ingest.readers.format import LINEAGE, MASKS, OBJECTS, REWARDS, TALK, Format
from treepack.ingest.readers.messages import (
    MEDIA_REASON,
    Messages,
    has_media,
    is_messages,
    is_text,
    normalise_messages,
    normalise_template_kwargs,
    normalise_tools,
)
from treepack.ingest.readers.records import Record
from treepack.trajectory import Chat, Skipped, Text, Trajectory

# Fields that become content; the others are metadata.
USED = frozenset({"messages", "prompt", "completion", "tools", "chat_template_kwargs"})


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the one trajectory of `record`.

    Raises:
        TreepackError: a field is missing or has another form.
    """
    value, source = record.value, record.source
    # Images are placeholders in the text, or parts of a message. No reader of text can train on either.
    talk = [value.get(name) for name in ("messages", "prompt", "completion")]
    if has_media(value) or not all(is_text(each) for each in talk if is_messages(each)):
        yield Skipped(source, MEDIA_REASON)
        return
    if value.get("messages") is not None:
        done = normalise_messages(_list(value["messages"], "messages", source), source=source)
    else:
        prompt, completion = value.get("prompt"), value.get("completion")
        if prompt is None or completion is None:
            raise TreepackError(f"{source}: has no messages; expected messages, or prompt and completion")
        # Text has no turns, so no chat template is applied to it.
        if isinstance(prompt, str) and isinstance(completion, str):
            yield describe(record, Text(prompt, completion), used={"prompt", "completion"}, options=options)
            return
        done = _prompt_and_completion(prompt, completion, source)
    tools = normalise_tools(value.get("tools"), source=source)
    # {"enable_thinking": false}: the trajectory keeps it, so that the prompt is rendered as it was sampled.
    variables = normalise_template_kwargs(value.get("chat_template_kwargs"), source=source)
    content = Chat(done.messages, done.weights, tools, variables)
    yield describe(record, content, used=USED, options=options, notes=done.notes)


def _prompt_and_completion(prompt: Any, completion: Any, source: str) -> Messages:
    if isinstance(prompt, str) or isinstance(completion, str):
        raise TreepackError(
            f"{source}: one of prompt and completion is text; expected both as text or both as messages"
        )
    # prompt [user], completion [assistant, user, assistant]: weights [0] + [1, 0, 1]
    num_prompt = len(_list(prompt, "prompt", source))
    done = normalise_messages([*prompt, *_list(completion, "completion", source)], source=source)
    weights = [0.0] * num_prompt + done.weights[num_prompt:]
    return Messages(done.messages, weights, done.notes)


def _list(value: Any, name: str, source: str) -> list[Any]:
    if not isinstance(value, list):
        raise TreepackError(f"{source}: {name} is not a list; expected a list of messages")
    return value


FORMAT = Format(
    name="chat",
    program="OpenAI chat JSONL, also with the marks of ART, rLLM and ms-swift; TRL prompt and completion",
    recognised_by="`messages`, or `prompt` and `completion`, as messages or as text",
    requires=[{"messages": OBJECTS}, {"prompt": TALK, "completion": TALK}],
    checked="none",
    used="""
        messages tools chat_template_kwargs prompt completion messages.loss messages.trainable messages.weight
        messages.loss_scale reward id group_id
    """.split(),
    dropped=(
        "images, videos, audios (records that have some are skipped)",
        "content parts that are not text (refused)",
    ),
    keeps={MASKS, REWARDS, LINEAGE},
    read=read,
)
