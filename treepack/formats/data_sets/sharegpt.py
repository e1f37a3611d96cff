"""Records of ShareGPT, `{conversations: [{from, value}], system, tools}`, and LLaMA-Factory's pairs of them.

    human "2 + 3?"   function_call '{"name": "add", "arguments": {..}}'   observation "5"   gpt "It is 5."
    =>  user         assistant {tool_calls: [add]}                        tool "5"          assistant "It is 5."

`chosen` and `rejected`, each one message, make a pair. A message may have marks such as `weight` and `train`
(`turn_weights`), and may be in chat form, with `role` and `content`. `tools` is often JSON text.
"""

from __future__ import annotations

from typing import Any

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    TreepackError,
    as_text,
    quoted,
    without,
)
from treepack.ingest.readers.messages.sft_messages import calls_of_text, read_conversation, read_pair

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "observation": "tool",
    "tool": "tool",
    "gpt": "assistant",
    "assistant": "assistant",
    # Names of assistants in the first data sets of ShareGPT.
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
_CALL = "function_call"
_USED = frozenset({"conversations", "system"})
# A pair has these two fields besides the common conversation.
_PAIR = frozenset({"chosen", "rejected"})
# Rows with both fields have the format harbor-traces: each row repeats the start of one conversation.


def _read_sharegpt(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one conversation of `record`, or the two of a pair.

    Raises:
        TreepackError: an unknown speaker, or a call that is not JSON.
    """
    value, source = record.value, record.source
    turns = [_message(turn, f"{source}: message {number}") for number, turn in enumerate(value["conversations"], 1)]
    if system := as_text(value.get("system"), source=source, name="system", default=""):
        turns = [{"role": "system", "content": system}, *turns]
    if value.get("chosen") is not None and value.get("rejected") is not None:
        chosen, rejected = ([_message(value[name], f"{source}: {name}")] for name in ("chosen", "rejected"))
        yield from read_pair(record, turns, chosen, rejected, options, used=_USED | _PAIR)
        return
    yield read_conversation(record, turns, options, used=_USED)


def _message(turn: Any, where: str) -> JsonObject:
    if isinstance(turn, dict) and "from" not in turn and "role" in turn:
        return turn
    speaker = turn.get("from") if isinstance(turn, dict) else None
    if not isinstance(speaker, str) or (speaker != _CALL and speaker not in _ROLES):
        known = ", ".join([*_ROLES, _CALL])
        raise TreepackError(f"{where} is from {quoted(speaker)}; expected one of {known}")
    # `normalise_messages` reads the marks among the other fields, and counts the marks that are not known.
    kept = without(turn, ("from", "value"))
    if speaker == _CALL:
        calls = calls_of_text(turn.get("value"), where=where)
        return kept | {"role": "assistant", "content": "", "tool_calls": calls}
    return kept | {"role": _ROLES[speaker], "content": turn.get("value")}


FORMAT = Format(
    name="sharegpt",
    rank=300,
    program="ShareGPT; LLaMA-Factory, Axolotl and others read it",
    recognised_by="`conversations`, a list of objects with `from` and `value`, or `role` and `content`",
    requires="conversations:first(from, value; role, content), trial_name|episode:!",
    used="""
        conversations.from conversations.value system tools chosen.value rejected.value kto_tag chosen.from
        rejected.from chosen.* rejected.* conversations!
    """,
    dropped="images, videos, audios (records that have some are skipped)",
    keeps="masks, rewards",
    read=_read_sharegpt,
)
