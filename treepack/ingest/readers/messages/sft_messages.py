"""Common parts of data sets for SFT trainers: rounds of text, tool calls as JSON text, and pairs of answers.

    ("Be brief.", [["2 + 2?", "4"]], "And 3 + 3?", "6")  --rounds-->  system, user, assistant, user, assistant
    '{"name": "add", "arguments": {"a": 2}}'             --calls_of_text-->  [{"name": "add", "arguments": {"a": 2}}]
    a prompt and two answers to it                       --read_pair-->  "<id>/chosen" of reward 1, "<id>/rejected" of 0

Each pair is a separate group, named after its place in the file, so that only the two answers of a pair are compared.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe
from treepack.ingest.readers.fields.values import JsonObject, as_text, is_messages, shown
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON, skip_reason, split_blocks
from treepack.ingest.readers.messages.conversation_settings import normalise_tools
from treepack.ingest.readers.messages.normal_form import has_media, normalise_messages
from treepack.ingest.readers.messages.prefills import with_prefills
from treepack.ingest.readers.messages.turn_weights import as_flag
from treepack.trajectory import Outcome, Outcomes, Skipped

Message = JsonObject
LABELS = ("label", "kto_tag")


def rounds(system: Any, history: Any, query: str, response: str | None, *, source: str) -> list[Message]:
    """Return the messages of a system prompt, earlier rounds `[query, response]`, a query, and its response if any.

    Raises:
        TreepackError: `system` is not text, or `history` is not a list of pairs of text.
    """
    system = as_text(system, source=source, name="system", default="")
    # An empty system prompt is not a message: data sets have the field in every record.
    messages = [{"role": "system", "content": system}] if system else []
    if not isinstance(history, list | None):
        raise TreepackError(f"{source}: history is {shown(history)}; expected a list")
    for number, pair in enumerate(history or []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise TreepackError(f"{source}: history[{number}] is {shown(pair)}; expected a query and its response")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    # ("S", [["a", "b"]], "q", "r") -> system S, user a, assistant b, user q, assistant r
    messages.append({"role": "user", "content": query})
    return messages if response is None else [*messages, {"role": "assistant", "content": response}]


def calls_of_text(text: Any, *, where: str) -> list[JsonObject]:
    """Return the tool calls of `text`, which is JSON: one object `{name, arguments}` or a list of them.

    Raises:
        TreepackError: it has no call.
    """
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not is_messages(calls) or not calls or not all(isinstance(call.get("name"), str) for call in calls):
        raise TreepackError(f"{where} has the call {shown(text)}; expected JSON with name and arguments")
    return list(calls)


def read_conversation(
    record: Record, messages: Sequence[Message], options: ReadOptions, *, used: Collection[str]
) -> Outcome:
    """Return the trajectory of one conversation, with the tools of the record; all assistant messages are trained.

    A `label` or `kto_tag` that is true or false, or 1 or 0, is the reward if the record has no other reward. It belongs
    to the last answer, so only this one is trained; the answers before it are its prompt.

    Raises:
        TreepackError: `readers.messages` refuses messages or tools.
    """
    if (reason := MEDIA_REASON if has_media(record.value) else skip_reason(messages)) is not None:
        return Skipped(record.source, reason)
    done = normalise_messages(split_blocks(messages), source=record.source)
    tools = normalise_tools(record.value.get("tools"), source=record.source)
    marks = [name for name in LABELS if as_flag(record.value.get(name)) is not None]
    content = done.chat(_last_answer(done.messages) if marks else 0, tools)
    item = describe(record, content, used={*used, "tools", *marks}, options=options, notes=done.notes)
    return replace(item, reward=float(bool(as_flag(record.value[marks[0]])))) if marks and item.reward is None else item


def _last_answer(messages: Sequence[Message]) -> int:
    """Return the place of the last answer, before which nothing is trained."""
    # roles [user, assistant, user, assistant] -> 3
    return max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=0)


def read_pair(
    record: Record,
    prompt: Sequence[Message],
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    options: ReadOptions,
    *,
    used: Collection[str],
) -> Outcomes:
    """Yield the two trajectories of a pair; assistant messages of `chosen` and `rejected` are trained, `prompt` is not.

    Raises:
        TreepackError: `readers.messages` refuses messages or tools.
    """
    reason = MEDIA_REASON if has_media(record.value) else skip_reason([*prompt, *chosen, *rejected])
    if reason is not None:
        yield Skipped(record.source, reason)
        return
    prompt = split_blocks(prompt)
    # Such a pair has no preference, and the two would be one branch of the trie with the rewards 1 and 0.
    if list(chosen) == list(rejected):
        yield Skipped(record.source, "chosen and rejected are the same")
        return
    tools = normalise_tools(record.value.get("tools"), source=record.source)
    told = set[str]()
    for side, answer, reward in (("chosen", chosen, 1.0), ("rejected", rejected, 0.0)):
        listed, num_prompt = with_prefills([*prompt, *split_blocks(answer)], len(prompt))
        done = normalise_messages(listed, source=f"{record.source}: {side}")
        content = done.chat(num_prompt, tools)
        notes = tuple(note for note in done.notes if note not in told)  # once per record
        told.update(notes)
        item = describe(record, content, used={*used, "tools"}, options=options, notes=notes)
        name = f"{item.trajectory_id}/{side}"
        yield replace(item, trajectory_id=name, group_id=record.source, reward=reward)


def read_whole_pair(
    record: Record,
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    options: ReadOptions,
    *,
    used: Collection[str],
) -> Outcomes:
    """Yield the two trajectories of a pair of conversations; their common first messages are the prompt.

    Raises:
        TreepackError: `readers.messages` refuses messages or tools.
    """
    # chosen U A U B, rejected U A U C -> shared U A U; an answer A in the prompt is not trained.
    both = zip(chosen, rejected, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    yield from read_pair(record, chosen[:shared], chosen[shared:], rejected[shared:], options, used=used)
