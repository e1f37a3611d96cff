"""Conversations in the message form of OpenAI: `messages`, or TRL's `prompt` and `completion`.

    {"messages": [...], "tools": [...]}                  every assistant message is trained
    {"messages": [...], "response": "..."}               the answer to the messages is trained, see `request_answer`
    {"prompt": [...], "completion": [...]}               every assistant message of the completion is trained
    {"prompt": "text", "completion": "text"}             the completion is trained
    {"system": "...", "messages": [...], "tools": [..]}  a request to Anthropic's API, whose blocks are split

A message may have marks such as `loss`, `train` and `weight` (`turn_weights`), and the reason why an answer ended, such
as `finish_reason` (`endings`); the record may have the reason of its last answer. A record may have
`chat_template_kwargs`, the variables of the chat template, for example {"enable_thinking": false}. Texts of AReaL's
dumps contain their end tokens, so none is added.
"""

from __future__ import annotations

from typing import Any

from treepack.calls.apis.request_answer import answer_messages, dialogue, message_list
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe
from treepack.ingest.readers.fields.values import BadValueError, JsonObject, close_names, is_messages, shown
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON, skip_reason, split_blocks
from treepack.ingest.readers.messages.conversation_settings import (
    TOOLS,
    normalise_template_kwargs,
    normalise_tools,
    tools_of,
)
from treepack.ingest.readers.messages.normal_form import has_media, normalise_messages
from treepack.ingest.readers.messages.prefills import mark_prefills, with_prefills
from treepack.trajectory import Outcomes, PromptCompletion, Skipped

# Fields of AReaL's dumps, whose texts were decoded with their special tokens.
_AREAL = frozenset({"seqlen", "prompt_len", "head_version", "tail_version"})
# Fields that become content; the others are metadata.
_SYSTEM = ("system", "system_prompt", "system_message")
_USED = frozenset({"messages", "prompt", "completion", "system", "chat_template_kwargs", "continue_final_message"})


def read_chat(record: Record, options: ReadOptions) -> Outcomes:
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
    used: frozenset[str] = _USED
    notes: tuple[str, ...] = ()
    if value.get("messages") is not None:
        found = dialogue(value, source)
        system = _system(value, found.messages)
        messages, num_prompt = with_prefills([*system, *found.messages], len(system) + found.num_prompt)
        used, notes = _USED | found.used, found.notes
    else:
        prompt, completion = value.get("prompt"), value.get("completion")
        if prompt is None or completion is None:
            _skip_failed(value, source)
            similar = close_names(value, ["messages", "prompt", "completion"])
            hint = f", but {', '.join(similar)}" if similar else ""
            raise TreepackError(f"{source}: has no messages{hint}; expected messages, or prompt and completion")
        # Text has no turns, so no chat template is applied to it.
        if isinstance(prompt, str) and isinstance(completion, str) and not (system := _system(value, [])):
            text = PromptCompletion(prompt, completion, has_special=value.keys() >= _AREAL)
            yield describe(record, text, used={"prompt", "completion"}, options=options)
            return
        if isinstance(prompt, str) and isinstance(completion, str):
            prompt = [{"role": "user", "content": prompt}]  # next to a system prompt, text is a message
        if isinstance(prompt, str):
            raise TreepackError(
                f"{source}: prompt is text and completion is messages; expected both as text or both as messages"
            )
        asked = split_blocks(message_list(prompt, "prompt", source))
        answer = answer_messages(completion, source)
        if answer is None:
            raise TreepackError(f"{source}: completion is {shown(completion)}; expected text or a list of messages")
        system = _system(value, asked)
        asked = [*system, *mark_prefills(asked, value, model=value.get("model"))]
        messages, num_prompt = with_prefills([*asked, *answer], len(asked))
    done = normalise_messages(messages, source=source)
    tools = normalise_tools(tools_of(value), source=source)
    # {"enable_thinking": false}: the trajectory keeps it, so that the prompt is rendered as it was sampled.
    variables = normalise_template_kwargs(value.get("chat_template_kwargs"), source=source)
    content = done.chat(num_prompt, tools, variables)
    used = used | TOOLS | (frozenset(_SYSTEM) if system else frozenset())
    yield describe(record, content, used=used, options=options, notes=done.notes + notes)


def _skip_failed(value: JsonObject, source: str) -> None:
    """Refuse one record of a request without an answer, so that it is skipped.

    Raises:
        BadValueError: a field of the content is null, or the record has an error in its place.
    """
    for name in ("messages", "prompt", "completion"):
        if name in value and value[name] is None:
            raise BadValueError(f"{source}: {name} is null; expected messages or text", f"{name} is null")
    if isinstance(value.get("error"), str | dict) and value["error"]:
        raise BadValueError(f"{source}: has an error and no messages", "record of an error")


def _system(value: JsonObject, messages: list[Any]) -> list[JsonObject]:
    """Return the system prompt that is a field next to the messages, as in a request to Anthropic's API."""
    system = next((value[name] for name in _SYSTEM if isinstance(value.get(name), str | list) and value[name]), None)
    has_system = bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "system"
    return [] if not system or has_system else [{"role": "system", "content": system}]
