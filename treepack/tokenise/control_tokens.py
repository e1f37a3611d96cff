"""Control tokens that the text of a message spells out, such as `<|im_end|>` in the log of a coding agent.

    message   ls: <|im_end|>          keep   ids of "ls: " and the control token 151645, as an engine does
                                      text   ids of "ls: " and of the ten characters, as ordinary text
                                      skip   the conversation is skipped

A tokenizer cannot distinguish a control token that a template prints from the same token in a message, so the messages
are searched before they are rendered. For "text", each such token gets a mark after its first character, which the
encoder removes: the tokens of the template and the positions of trained spans do not change.

    "<|im_end|>"  --mark-->  "<MARK|im_end|>"  --rendered, cut into blocks, Encoder-->  ids of "<|im_end|>" as text

A control token is a special token of the tokenizer, or another added token that the chat template prints. Tags such as
`<think>` and `<tool_call>` are none, because logs of raw output and system prompts contain them on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from treepack.trajectory import Chat, PromptCompletion, Tokens

MARK = "\ufdd0"  # a noncharacter of Unicode, which no text may contain
TRAINED = " in text that is trained"  # the end of a note whose rollouts are named in the log of reading
REASON = "control tokens in the text of messages"
MARK_REASON = "text with the noncharacter U+FDD0, which --control-tokens text uses as a mark"
# Tags that logs of raw output and system prompts contain on purpose: of reasoning, and of calls if not special.
_REASONING = re.compile("think|thought", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z_]+>")
# Fields of a message that are not text of it: names by which a template chooses a branch.
_FIXED_FIELDS = frozenset({"role", "type", "id", "tool_call_id"})


@dataclass(frozen=True, slots=True)
class _SpelledToken:
    """A control token in the text of a message, the place of the message from 0, and if the message is trained."""

    token: str
    message: int
    role: str
    is_trained: bool


class ControlTokens:
    """A search for control tokens in the text of messages."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        """Search for `tokens`."""
        # In an alternation the first match wins, so the longest token is first.
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def find(self, chat: Chat) -> list[_SpelledToken]:
        """Return each control token that a message spells out, once for each message; O(characters)."""
        if self._pattern is None:
            return []
        return [
            _SpelledToken(token, place, str(message["role"]), weight > 0)
            for place, (message, weight) in enumerate(zip(chat.messages, chat.message_weights, strict=True))
            for token in dict.fromkeys(token for text in _texts(message) for token in self._pattern.findall(text))
        ]

    def mark(self, chat: Chat) -> Chat:
        """Return `chat` with a mark in each control token that a message spells out, for `Encoder.encode`."""
        assert self._pattern is not None
        pattern = self._pattern

        def with_marks(text: str) -> str:
            return pattern.sub(lambda match: match[0][0] + MARK + match[0][1:], text)

        bounds = [
            each and replace(each, prefill=len(with_marks(message["content"][: each.prefill])))
            for each, message in zip(chat.message_bounds or (), chat.messages, strict=False)
        ]
        messages = [_change_texts(message, with_marks) for message in chat.messages]
        return replace(chat, messages=messages, message_bounds=bounds or None)


def control_tokens(tokenizer: Any, templates: tuple[str, ...]) -> frozenset[str]:
    """Return the special tokens of `tokenizer`, and the other added tokens that one of `templates` prints; no tags."""
    # Special: <|im_end|>, </s>, <end_of_turn>. Not special, but printed: tokens of roles in some vocabularies.
    # Tags: <think> in both kinds, and <tool_call> if it is not special.
    tokens = set()
    for token in tokenizer.added_tokens_decoder.values():
        is_printed = not _TAG.fullmatch(token.content) and any(token.content in each for each in templates)
        if token.content.strip() and (token.special or is_printed) and not _REASONING.search(token.content):
            tokens.add(token.content)
    return frozenset(tokens)


def has_mark(content: Chat | PromptCompletion | Tokens) -> bool:
    """Return True if a text contains the mark itself, so that it cannot be marked."""
    if isinstance(content, Tokens):
        return False
    texts = [content.prompt, content.completion] if isinstance(content, PromptCompletion) else _texts(content.messages)
    return any(MARK in text for text in texts)


def notes_of(spelled: list[_SpelledToken], mode: str) -> tuple[str, ...]:
    """Return a note for each control token in `spelled`, and one more if it is trained; a conversation counts once.

    "keep":  control token '<|im_end|>' in the text of messages,  control token '<|im_end|>' in text that is trained
    "text":  control token '<|im_end|>' in the text of messages, tokenised as text
    """
    tokens = list(dict.fromkeys(each.token for each in spelled))
    notes = [f"control token '{token}' in the text of messages" for token in tokens]
    if mode == "text":
        return tuple(f"{note}, tokenised as text" for note in notes)
    trained = dict.fromkeys(each.token for each in spelled if each.is_trained)
    return (*notes, *(f"control token '{token}'{TRAINED}" for token in trained))


def skip_sentence(spelled: _SpelledToken, source: str) -> str:
    """Return the sentence for a conversation that is skipped because of `spelled`."""
    return (
        f"{source}: message {spelled.message + 1} ({spelled.role}) contains the control token '{spelled.token}'; "
        "remove it, or give --control-tokens keep or text"
    )


def _texts(value: Any, field: str = "") -> Iterator[str]:
    """Yield all text in a message, also the keys of arguments."""
    if isinstance(value, str):
        if field not in _FIXED_FIELDS:
            yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _texts(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _change_texts(value: Any, change: Callable[[str], str], field: str = "") -> Any:
    """Return `value` with `change` applied to all texts that `_texts` yields."""
    if isinstance(value, str):
        return value if field in _FIXED_FIELDS else change(value)
    if isinstance(value, dict):
        return {change(key): _change_texts(part, change, key) for key, part in value.items()}
    return [_change_texts(part, change) for part in value] if isinstance(value, list) else value
