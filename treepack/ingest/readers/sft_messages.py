"""What the data sets of SFT trainers share: rounds of text, tool calls as JSON text, and pairs of answers.

    ("Be brief.", [["2 + 2?", "4"]], "And 3 + 3?", "6")  --rounds-->  system, user, assistant, user, assistant
    '{"name": "add", "arguments": {"a": 2}}'             --calls_of_text-->  [{"name": "add", "arguments": {"a": 2}}]
    a prompt and two answers to it                       --read_pair-->  "<id>/chosen" of reward 1, "<id>/rejected" of 0

A pair is a group of its own, called after where it was read, so that the pairs that are compared are those of the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields import ReadOptions, describe, shown
from treepack.ingest.readers.messages import (
    MEDIA_REASON,
    has_media,
    is_messages,
    is_text,
    normalise_messages,
    normalise_tools,
)
from treepack.ingest.readers.records import Record
from treepack.trajectory import Chat, Skipped, Trajectory

Message = dict[str, Any]


def rounds(system: Any, history: Any, query: str, response: str | None, *, source: str) -> list[Message]:
    """Messages of a system prompt, earlier rounds `[query, response]`, a query, and its response where there is one.

    Raises:
        TreepackError: `system` is no text, or `history` no list of pairs of text.
    """
    if system is not None and not isinstance(system, str):
        raise TreepackError(f"{source}: system is {shown(system)}; expected text")
    messages = [{"role": "system", "content": system}] if system else []
    for number, pair in enumerate(_list(history, "history", source)):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise TreepackError(f"{source}: history[{number}] is {shown(pair)}; expected a query and its response")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": query})
    return messages if response is None else [*messages, {"role": "assistant", "content": response}]


def calls_of_text(text: Any, *, where: str) -> list[dict[str, Any]]:
    """The tool calls that `text` holds as JSON, one object `{name, arguments}` or a list of them.

    Raises:
        TreepackError: it holds none.
    """
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not is_messages(calls) or not calls or not all(isinstance(call.get("name"), str) for call in calls):
        raise TreepackError(f"{where} holds the call {shown(text)}; expected JSON with name and arguments")
    return list(calls)


def read_chat(
    record: Record, messages: Sequence[Message], options: ReadOptions, *, used: Collection[str]
) -> Trajectory | Skipped:
    """The trajectory of one conversation, in which every assistant message is trained; tools are those of the record.

    A boolean `label` or `kto_tag` is the reward, 1 or 0, where the record has no other.

    Raises:
        TreepackError: messages or tools that `readers.messages` refuses.
    """
    if has_media(record.value) or not is_text(messages):
        return Skipped(record.source, MEDIA_REASON)
    done = normalise_messages(messages, source=record.source)
    content = Chat(done.messages, done.weights, normalise_tools(record.value.get("tools"), source=record.source))
    marks = [name for name in ("label", "kto_tag") if isinstance(record.value.get(name), bool)]
    found = describe(record, content, used={*used, "tools", *marks}, options=options, notes=done.notes)
    return replace(found, reward=float(record.value[marks[0]])) if marks and found.reward is None else found


def read_pair(
    record: Record,
    prompt: Sequence[Message],
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    options: ReadOptions,
    *,
    used: Collection[str],
) -> Iterator[Trajectory | Skipped]:
    """The two trajectories of a pair; what the assistant wrote in `chosen` and `rejected` is trained, not in `prompt`.

    Raises:
        TreepackError: messages or tools that `readers.messages` refuses.
    """
    if has_media(record.value) or not is_text([*prompt, *chosen, *rejected]):
        yield Skipped(record.source, MEDIA_REASON)
        return
    if list(chosen) == list(rejected):
        yield Skipped(record.source, "chosen and rejected are the same")
        return
    tools = normalise_tools(record.value.get("tools"), source=record.source)
    for side, answer, reward in (("chosen", chosen, 1.0), ("rejected", rejected, 0.0)):
        done = normalise_messages([*prompt, *answer], source=f"{record.source}: {side}")
        weights = [0.0] * len(prompt) + done.weights[len(prompt) :]
        content = Chat(done.messages, weights, tools)
        notes = done.notes if side == "chosen" else ()
        found = describe(record, content, used={*used, "tools"}, options=options, notes=notes)
        name = f"{found.trajectory_id}/{side}"
        yield replace(found, trajectory_id=name, group_id=record.source, reward=reward)


def read_whole_pair(
    record: Record,
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    options: ReadOptions,
    *,
    used: Collection[str],
) -> Iterator[Trajectory | Skipped]:
    """The two trajectories of a pair of conversations; the messages that both begin with are their prompt.

    Raises:
        TreepackError: messages or tools that `readers.messages` refuses.
    """
    both = zip(chosen, rejected, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    yield from read_pair(record, chosen[:shared], chosen[shared:], rejected[shared:], options, used=used)


def _list(value: Any, name: str, source: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a list")
    return value or []
