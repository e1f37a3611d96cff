"""Calls of one rollout by their messages: calls that continue each other as one conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treepack.calls.copied_turns import once
from treepack.calls.rollout_names import with_rollout_names
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe
from treepack.ingest.readers.fields.values import BadValueError, JsonObject
from treepack.ingest.readers.messages.content_blocks import split_blocks
from treepack.ingest.readers.messages.conversation_settings import normalise_template_kwargs, normalise_tools
from treepack.ingest.readers.messages.normal_form import NormalMessages, normalise_messages
from treepack.ingest.readers.messages.prefills import NEW_TURN_NOTE, is_answer, with_prefills
from treepack.trajectory import Chat, Outcomes, Skipped, check_temperatures


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One call by its messages, as logged. The assistant messages of the response are trained, the prompt is not.

    `temperature` is that of the sampler for the response, None if it is not known. `ending` is the raw value of the
    field with the reason why the response ended (`endings`), None if there is none or if the messages have it. `name`
    is the id of the response, which other exports of the same call have too.
    """

    prompt: Sequence[Any]
    response: Sequence[Any]
    tools: Any = None
    chat_template_kwargs: Any = None
    temperature: float | None = None
    ending: Any = None
    name: Any = None


@dataclass(frozen=True, slots=True)
class _JoinedChat:
    """Calls that continue each other, as one conversation; `calls` are their numbers from 0."""

    calls: tuple[int, ...]
    content: Chat
    notes: tuple[str, ...] = ()


@once
def read_chats(record: Record, calls: Sequence[ChatCall], options: ReadOptions) -> Outcomes:
    """Yield the trajectories of a rollout whose `calls` are messages; `record` has its other fields.

    A bad value, such as that of the reward, or a message without content, skips the rollout. A call that another
    record has too, by its name, is left out.

    Raises:
        TreepackError: `readers.messages` refuses messages or tools.
    """
    # Fields of the rollout about its end describe its last call, unless the calls have fields of their own.
    last = len(calls) - 1 if all(call.ending is None for call in calls) else len(calls)
    try:
        joined = join_chats(calls, source=record.source)
        items = [
            describe(record, part.content, used=(), options=options, notes=part.notes, has_end=last in part.calls)
            for part in joined
        ]
    except BadValueError as error:
        yield Skipped(record.source, error.reason, detail=str(error))
        return
    # The whole rollout is truncated if its last call is; another one may be a call of a sub-agent.
    ends = [item.is_truncated for item, part in zip(items, joined, strict=True) if len(calls) - 1 in part.calls]
    items = [replace(item, is_truncated=any(ends)) for item in items] if ends else items
    yield from with_rollout_names(record, items, [part.calls for part in joined], num_calls=len(calls))


def join_chats(calls: Sequence[ChatCall], *, source: str) -> list[_JoinedChat]:
    """Join two of `calls` if the prompt of one begins with all messages of the other, and both have the same tools.

    Raises:
        TreepackError: `readers.messages` refuses messages or tools.
    """
    runs: list[_JoinedChat] = []
    logged: list[list[Any]] = []  # the messages of each run as they were logged, before they were normalised
    parts: dict[int, list[Any]] = {}  # each logged message with its blocks split, by its identity
    for number, call in enumerate(calls):
        if not call.response:
            continue
        prompt = [part for message in call.prompt for part in _split(message, parts)]
        where = f"{source}: call {number + 1}"
        response = endings.mark(split_blocks(call.response), call.ending)
        messages, num_prompt = with_prefills([*prompt, *response], len(prompt))
        # A later prompt repeats an answer without the reason why it ended.
        whole = [endings.without_fields(message) for message in messages]
        # Successive prompts repeat nearly all messages. A repeated message need not be normalised again, so only the
        # messages after the longest equal run are: normalising all would be quadratic in the number of turns.
        equal_runs = [i for i, messages in enumerate(logged) if messages == whole[: min(num_prompt, len(messages))]]
        longest = max(equal_runs, key=lambda i: len(logged[i]), default=-1)
        start = len(logged[longest]) if equal_runs else 0
        done = normalise_messages(
            messages[start:], source=where, before=_messages(runs[longest]) if equal_runs else None
        )
        if num_prompt and is_answer(whole[num_prompt - 1]):
            done = replace(done, notes=(*done.notes, NEW_TURN_NOTE))
        tools = normalise_tools(call.tools, source=where)
        if call.temperature is not None:
            check_temperatures(np.array([call.temperature]), source=where, name="temperature")
        variables = normalise_template_kwargs(call.chat_template_kwargs, source=where)
        own = done.chat(num_prompt, tools, variables)
        temperatures = [None] * num_prompt + [call.temperature] * (len(done.messages) - num_prompt)
        own = replace(own, message_temperatures=temperatures)
        # Equal as logged is not enough (the tools may differ), and not needed (null and "" are the same content).
        continued = [
            i
            for i, run in enumerate(runs)
            if (run.content.tools, run.content.chat_template_kwargs) == (tools, variables)
            and run.content.messages == done.messages[: min(num_prompt, len(run.content.messages))]
        ]
        if not continued:
            runs.append(_JoinedChat((number,), _after(None, own, num_prompt), done.notes))
            logged.append(whole)
            continue
        longest = max(continued, key=lambda i: len(runs[i].content.messages))
        before = runs[longest]
        notes = tuple(dict.fromkeys((*before.notes, *done.notes)))  # each note once, in order
        runs[longest] = _JoinedChat((*before.calls, number), _after(before.content, own, num_prompt), notes)
        logged[longest] = whole
    return runs


def _after(before: Chat | None, own: Chat, num_prompt: int) -> Chat:
    """Return `own`, a call after a prompt of `num_prompt` messages that begins with `before`."""
    # Weights 0 1 of the run, 0 0 0 1 of the call -> 0 1 0 1: a prompt must not untrain an earlier response.
    changes: JsonObject = {}
    for name, default in _BY_MESSAGE.items():
        first = (getattr(before, name) if before else None) or [default] * (len(before.messages) if before else 0)
        rest = (getattr(own, name) or [default] * len(own.messages))[max(len(first), num_prompt) :]
        values = [*first, *[default] * (num_prompt - len(first)), *rest]
        changes[name] = values if name == "message_weights" or any(each != default for each in values) else None
    return replace(own, **changes)


# Fields of a `Chat` with a value for each message, and the value of a message of the prompt.
_BY_MESSAGE = {"message_weights": 0.0, "message_temperatures": None, "message_cuts": False, "message_bounds": None}


def _split(message: Any, parts: dict[int, list[Any]]) -> list[Any]:
    # Readers put the same message into the prompts of all later calls. `calls` keeps it, so its identity stays unique.
    split = parts.get(id(message))
    return parts.setdefault(id(message), split_blocks([message])) if split is None else split


def _messages(run: _JoinedChat) -> NormalMessages:
    num = len(run.content.messages)
    cuts, bounds = run.content.message_cuts or [False] * num, run.content.message_bounds or [None] * num
    return NormalMessages(run.content.messages, run.content.message_weights, run.notes, cuts, bounds)
