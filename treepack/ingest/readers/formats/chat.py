"""Conversations in the message form of OpenAI: `messages`, or TRL's `prompt` and `completion`.

    {"messages": [...], "tools": [...]}                  every assistant message is trained
    {"prompt": [...], "completion": [...]}               every assistant message of the completion is trained
    {"prompt": "text", "completion": "text"}             the completion is trained
    {"system": "...", "messages": [...], "tools": [..]}  a request to Anthropic's API, whose blocks are split

A message may have marks such as `loss`, `train` and `weight` (`turn_weights`), and the reason why an answer ended, such
as `finish_reason` (`endings`); the record may have the reason of its last answer. A record may have
`chat_template_kwargs`, the variables of the chat template, for example {"enable_thinking": false}. Texts of AReaL's
dumps contain their end tokens, so none is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.content_blocks import MEDIA_REASON, skip_reason, split_blocks
from treepack.ingest.readers.fields import ReadOptions, describe
from treepack.ingest.readers.format import LINEAGE, MASKS, OBJECTS, REWARDS, TALK, Format, close_names
from treepack.ingest.readers.messages import (
    Messages,
    has_media,
    is_messages,
    normalise_messages,
    normalise_template_kwargs,
    normalise_tools,
)
from treepack.ingest.readers.records import Record
from treepack.trajectory import Chat, Skipped, Text, Trajectory

# Fields of AReaL's dumps, whose texts were decoded with their special tokens.
AREAL = frozenset({"seqlen", "prompt_len", "head_version", "tail_version"})
# Fields that become content; the others are metadata.
USED = frozenset({"messages", "prompt", "completion", "system", "tools", "chat_template_kwargs"})


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the one trajectory of `record`.

    Raises:
        TreepackError: a field is missing or has another form.
    """
    value, source = record.value, record.source
    # Images are placeholders in the text, or parts of a message. No reader of text can train on either.
    talk = [value.get(name) for name in ("messages", "prompt", "completion")]
    messages = [message for each in talk if is_messages(each) for message in each]
    if (reason := MEDIA_REASON if has_media(value) else skip_reason(messages)) is not None:
        yield Skipped(source, reason)
        return
    if value.get("messages") is not None:
        messages = split_blocks(_list(value["messages"], "messages", source))
        done = normalise_messages([*_system(value, messages), *messages], source=source)
    else:
        prompt, completion = value.get("prompt"), value.get("completion")
        if prompt is None or completion is None:
            similar = close_names(value, ["messages", "prompt", "completion"])
            hint = f", but {', '.join(similar)}" if similar else ""
            raise TreepackError(f"{source}: has no messages{hint}; expected messages, or prompt and completion")
        # Text has no turns, so no chat template is applied to it.
        if isinstance(prompt, str) and isinstance(completion, str):
            text = Text(prompt, completion, has_special=value.keys() >= AREAL)
            yield describe(record, text, used={"prompt", "completion"}, options=options)
            return
        done = _prompt_and_completion(prompt, completion, source)
    tools = normalise_tools(value.get("tools"), source=source)
    # {"enable_thinking": false}: the trajectory keeps it, so that the prompt is rendered as it was sampled.
    variables = normalise_template_kwargs(value.get("chat_template_kwargs"), source=source)
    content = Chat(done.messages, done.weights, tools, variables, message_cuts=done.cuts)
    yield describe(record, content, used=USED, options=options, notes=done.notes)


def _prompt_and_completion(prompt: Any, completion: Any, source: str) -> Messages:
    if isinstance(prompt, str) or isinstance(completion, str):
        raise TreepackError(
            f"{source}: one of prompt and completion is text; expected both as text or both as messages"
        )
    # prompt [user], completion [assistant, user, assistant]: weights [0] + [1, 0, 1]
    asked, answered = (
        split_blocks(_list(prompt, "prompt", source)),
        split_blocks(_list(completion, "completion", source)),
    )
    done = normalise_messages([*asked, *answered], source=source)
    weights = [0.0] * len(asked) + done.weights[len(asked) :]
    return replace(done, weights=weights)


def _system(value: dict[str, Any], messages: list[Any]) -> list[dict[str, Any]]:
    """Return the system prompt of a request to Anthropic's API, which is a field beside the messages."""
    system = value.get("system")
    has_system = bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "system"
    return [] if not system or has_system else [{"role": "system", "content": system}]


def _list(value: Any, name: str, source: str) -> list[Any]:
    if not isinstance(value, list):
        raise TreepackError(f"{source}: {name} is not a list; expected a list of messages")
    return value


FORMAT = Format(
    name="chat",
    program="OpenAI chat JSONL, with marks of ART, rLLM and ms-swift; TRL prompt and completion; Anthropic requests",
    recognised_by="`messages`, or `prompt` and `completion`, as messages or as text",
    requires=[{"messages": OBJECTS}, {"prompt": TALK, "completion": TALK}],
    checked="none",
    used="""
        system messages tools chat_template_kwargs prompt completion messages.loss messages.trainable messages.weight
        messages.loss_scale reward id group_id
    """.split(),
    dropped=(
        "images, videos, audios (records that have some are skipped)",
        "content parts except text, tool_use, tool_result and thinking (records that have some are skipped)",
    ),
    keeps={MASKS, REWARDS, LINEAGE},
    read=read,
)
