"""The slow twin of append-only sequences: every message rendered once, by hand, for templates of the ChatML family.

    prompt of turn 1 | body 1 | "\\n" + new messages + "<|im_start|>assistant\\n" | body 2 | ...

A prompt and a body are differences of renderings by the tokenizer itself; the messages between two turns are written
by hand, because the template of the tokenizer may render them differently after other turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Sections = list[tuple[str, bool]]  # text, and whether it is trained


def append_only_sections(
    tokenizer: Any, messages: list[Message], tools: Any, print_messages: Callable[[list[Message]], str]
) -> Sections:
    """Return the sections of the append-only sequence of `messages`, in which every assistant message is trained."""

    def render(until: int, *, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(messages[:until], tools=tools, tokenize=False, add_generation_prompt=prompt)
        )

    sections: Sections = []
    last = 0
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(k, prompt=True)
        new = print_messages(messages[last:k])
        sections.append(("\n" + new + "<|im_start|>assistant\n" if sections else prompt, False))
        whole = render(k + 1, prompt=False)
        assert whole.startswith(prompt)
        sections.append((whole[len(prompt) :].removesuffix("\n"), True))
        last = k + 1
    return sections


def ids_of_sections(tokenizer: Any, sections: Sections) -> tuple[list[int], list[bool]]:
    """Return the ids of the sections, each tokenised alone, and which of them are trained."""
    ids: list[int] = []
    trained: list[bool] = []
    for text, is_trained in sections:
        of_section = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += of_section
        trained += [is_trained] * len(of_section)
    return ids, trained


def chatml(messages: list[Message]) -> str:
    """Print messages that are not of the assistant, as the templates of `byte_tokenizer` do."""
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


def qwen(messages: list[Message]) -> str:
    """Print messages that are not of the assistant, as Qwen's templates do: successive results are one user message."""
    text = ""
    for i, message in enumerate(messages):
        if message["role"] != "tool":
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            continue
        starts = i == 0 or messages[i - 1]["role"] != "tool"
        ends = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
        text += "<|im_start|>user" if starts else ""
        text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
        text += "<|im_end|>\n" if ends else ""
    return text
