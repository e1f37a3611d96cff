"""Made conversations of an agent with tools, of any length."""

from __future__ import annotations

import json
import random
from typing import Any

WORDS = (
    "the ticket of this customer has a broken chain and needs new parts from our branch on Quay Street before Friday "
    "because rain made every bearing rust again"
).split()


def agent_chat(
    turns: int, *, seed: int = 0, reasoning: bool = False, tools: bool = True, words: int = 40, as_text: bool = False
) -> list[dict[str, Any]]:
    """Return the messages of a conversation with `turns` answers; the user speaks before every seventh of them.

    All other answers but the last one call a tool, or if `tools` is False, the user speaks before every answer. With
    `as_text` the arguments of calls are JSON text. `words` is the number of words in a result, about twice that of an
    answer.
    """
    choose = random.Random(seed)

    def say(number: int) -> str:
        return " ".join(choose.choice(WORDS) for _ in range(number)) + f" {choose.randrange(10**6)}."

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": say(2 * words)},
        {"role": "user", "content": say(30)},
    ]
    for i in range(turns):
        message: dict[str, Any] = {"role": "assistant", "content": say(words // 2)}
        messages.append(message)
        if reasoning:
            message["reasoning_content"] = say(20)
        if i == turns - 1:
            break
        if i % 7 == 6 or not tools:
            messages.append({"role": "user", "content": say(30)})
            continue
        arguments: Any = {"query": say(6), "limit": i % 9}
        function = {"name": "find", "arguments": json.dumps(arguments) if as_text else arguments}
        message["tool_calls"] = [{"id": f"call{i:05}", "type": "function", "function": function}]
        messages.append({"role": "tool", "tool_call_id": f"call{i:05}", "name": "find", "content": say(words)})
    return messages
