"""The stop tokens that samples train with a chat template: a plain conversation, and one with a call and its result.

    plain   user, answer, user, answer        calling   user, call, result, answer

The second answer of each is the last message, so that no later message prints the marker by which it may end.
"""

from __future__ import annotations

from typing import Any

from support.read_rollouts import tokenize
from support.template_oracle import decode
from treepack.trajectory import Chat, Skipped, Trajectory

TOOL = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "Number of parts.",
        "parameters": {"type": "object", "properties": {"part": {"type": "string", "description": "Its name."}}},
    },
}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "stock", "arguments": '{"part": "bolt"}'}}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "stock", "content": "count7"}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


PLAIN = [user("Bolts?"), assistant("SAID1"), user("Nuts?"), assistant("SAID2")]
CALLING = [user("Bolts?"), assistant("", tool_calls=[CALL]), RESULT, assistant("SAID2")]


def read(
    tokenizer: Any, messages: list[dict[str, Any]], *, cut: bool = False, **options: Any
) -> list[Trajectory | Skipped]:
    """Return the samples of a conversation; with `cut`, a limit cut all of its answers."""
    answers = [message["role"] == "assistant" for message in messages]
    tools = [TOOL] if RESULT in messages else None
    chat = Chat(messages, list(map(float, answers)), tools, message_cuts=answers if cut else None)
    return list(tokenize([Trajectory("t", "s:1", chat)], tokenizer=tokenizer, **options))


def ends(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str] | None:
    """Return the last special token of each turn if it is at the end of the trained text, else ""; None if skipped."""
    samples = read(tokenizer, messages)
    if any(isinstance(sample, Skipped) for sample in samples):
        return None
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = [
        text.rstrip()
        for sample in samples
        if isinstance(sample, Trajectory)
        for text in decode(tokenizer, sample).trained
    ]
    # Generation marks may put the end of a turn into a span of its own: "SAID1", "<turn|>\n" -> "SAID1<turn|>".
    turns: list[str] = []
    for text in texts:
        if "SAID" in text or "stock" in text or not turns:
            turns.append(text)
        else:
            turns[-1] += text
    found = [max((token for token in special if turn.endswith(token)), key=len, default="") for turn in turns]
    inside = ("tool_call", "tool\u2581call")
    return ["" if any(each in token for each in inside) else token for token in found]
