"""The append-only sequence of a conversation, which most trainers make: every message is rendered once.

    prompt of turn 1 | body 1 | new messages | body 2 | new messages | body 3
                       ~~~~~~                  ~~~~~~                  ~~~~~~ trained

A body is the text that the model wrote, with its end token. The new messages are all messages between two trained
turns, with the generation prompt of the next one. If the template keeps earlier turns as they are, the new messages are
a part of the rendering, and the sequence is the trajectory itself. If it rewrites earlier turns, the new messages are
rendered after a short conversation of a user and the calls of the turn before, whose text is then removed:

    <|user|>-<|end|><|assistant|>REPLY<|end|><|tool|>T<|end|><|assistant|>
                                             ------------------------------ new messages

Such sequences are only counted, because a forecast compares with them. No trajectory of treepack is made like this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from treepack.tokenise.chat_template import RenderedTurn
from treepack.trajectory import Chat

# Keys of sums in the log of reading. The first four are sums over the append-only sequences of all rollouts. ABSENT
# counts the rollouts whose template allows no such sequence; their longest sample counts instead.
SEQUENCES, TOKENS, PAIRS, TARGETS, ABSENT = (
    f"append_only_{name}" for name in ("sequences", "tokens", "pairs", "targets", "absent")
)
# The trained turns of all conversations, the parts into which templates that rewrite earlier turns split them, and the
# conversations with several parts.
TURNS, PARTS, SPLIT = "turns", "parts", "split"
_REPLY = "treepack-reply"  # content of the assistant message before the new ones; no log contains it
_SAME_END = 24  # characters by which the ends of two texts are compared: longer than any end token
_MAX_OPENING = 64  # characters of a turn between its generation prompt and its trained text

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]  # messages, with the generation prompt or without -> text
Spans = list[tuple[int, int, float]]


def sequence_totals(num_tokens: int, num_targets: int) -> Counter[str]:
    """Return the sums of one append-only sequence, with the score pairs of causal attention."""
    # Token i sees i + 1 tokens: 3 tokens have 1 + 2 + 3 = 6 pairs.
    pairs = num_tokens * (num_tokens + 1) // 2
    return Counter({SEQUENCES: 1, TOKENS: num_tokens, PAIRS: pairs, TARGETS: num_targets})


def continues(before: RenderedTurn, turn: RenderedTurn) -> bool:
    """Return whether the text of `turn` continues the text of the turn `before`, and trains only later text."""
    # The second condition: a span inside the earlier text would train the same characters twice.
    return turn.spans[0][0] >= len(before.text) and turn.text.startswith(before.text)


def turn_totals(turns: Sequence[RenderedTurn]) -> Counter[str]:
    """Return the sums of a conversation with these trained turns, at least one."""
    num_parts = 1 + sum(not continues(before, turn) for before, turn in pairwise(turns))
    return Counter({TURNS: len(turns), PARTS: num_parts, SPLIT: int(num_parts > 1)})


def append_only_text(
    chat: Chat, turns: Sequence[RenderedTurn], render: Render, special: tuple[str, ...]
) -> tuple[str, Spans] | None:
    """Return the text of the append-only sequence of `chat` up to its last turn, and its trained spans of characters.

    Args:
        chat: the conversation, with the messages that `render` takes.
        turns: its trained turns, at least one.
        render: the chat template of the conversation.
        special: special tokens of the tokenizer, one of which may end a turn.

    Returns:
        Text and spans, or None if the new messages of a turn cannot be separated from the rest of their rendering.
    """
    text = str(turns[0].text)
    spans: Spans = [(start, end, turns[0].weight) for start, end in turns[0].spans]
    for before, turn in pairwise(turns):
        start = turn.spans[0][0]
        if continues(before, turn):
            new: str | None = turn.text.slice(len(before.text), start)
        else:
            new = _new_messages(chat.messages, before, turn, render, special)
        if new is None:
            return None
        # Body at 40 of its rendering, 100 characters so far, 12 of new messages -> shift 100 + 12 - 40 = 72.
        shift = len(text) + len(new) - start
        spans += [(a + shift, b + shift, turn.weight) for a, b in turn.spans]
        text += new + turn.text.slice(start)
    return text, spans


def _new_messages(
    messages: list[Message], before: RenderedTurn, turn: RenderedTurn, render: Render, special: tuple[str, ...]
) -> str | None:
    """Return the text between the body of `before` and the body of `turn`, or None if it cannot be separated."""
    replied = messages[before.message]
    reply = {"role": "assistant", "content": _REPLY}
    if replied.get("tool_calls"):  # without the call, templates refuse its result
        reply["tool_calls"] = replied["tool_calls"]
    base = [{"role": "user", "content": "-"}, reply]
    new = messages[before.message + 1 : turn.message]
    ended, continued = render(base, False), render(base + new, True)
    after = _after_reply(ended, continued)
    if after is None:
        return None
    tail, rest = after
    # A marker of the next role at the end of the body belongs to the new messages, which print it too.
    stem = before.text.prefix(len(before.text) - len(before.marker))
    size = _size_of_end(stem.slice(max(0, len(stem) - _SAME_END)), tail)
    if size == 0 and replied.get("tool_calls") and not before.marker:
        return None
    if rest.startswith(tail[:size]):
        between = rest[size:]
    else:
        # Another end token in the middle of a conversation than at its end: <|end|> for <|return|>.
        end = next((token for token in special if token and rest.startswith(token)), None)
        if end is None:
            return None
        between = rest[len(end) :]
    between = between.removeprefix(before.marker)
    return _before_body(between, turn, lambda: continued.removeprefix(render(base + new, False)))


def _after_reply(ended: str, continued: str) -> tuple[str, str] | None:
    """Return the text after the reply in the rendering that ends with it, and in the one with new messages."""
    if _REPLY in ended and _REPLY in continued:
        (before, _, tail), (before_new, _, rest) = ended.rpartition(_REPLY), continued.rpartition(_REPLY)
        # Some templates print a result before the content of the call: then `rest` lacks it.
        return (tail, rest) if len(before_new) <= len(before) else None
    # The template prints no content next to calls. Then the earlier text must be unchanged, and its last characters,
    # the end of the calls, are used in place of the reply.
    stem = ended.rstrip()
    at = max(0, len(stem) - _SAME_END)
    return (ended[at:], continued[at:]) if stem and continued.startswith(stem) else None


def _size_of_end(body: str, tail: str) -> int:
    """Return the number of characters of `tail`, the text after a reply, that belong to a body that ends like it."""
    # A body that ends with "<call><|end|>" and the tail "<call><|end|>\n": 13, because the newline is not trained.
    for size in range(len(tail), 0, -1):
        end = tail[max(0, size - _SAME_END) : size]
        if body.endswith(end):
            return size
    return 0


def _before_body(between: str, turn: RenderedTurn, generation_prompt: Callable[[], str]) -> str | None:
    """Change the end of `between`, a generation prompt, so that the body of `turn` can follow; None if that fails."""
    start = turn.spans[0][0]
    # The end of the prompt, in which everything that matters is found.
    end, body = turn.text.slice(max(0, start - _SAME_END), start), turn.text.slice(start)
    if end.endswith(between[-_SAME_END:]):
        return between
    generation = generation_prompt()
    if generation and body.startswith(generation):  # the template marks it as generated
        return between.removesuffix(generation)
    # Text of the turn that is not trained, such as an empty think block: generation prompt "<|assistant|><think>" and
    # prompt "...<|assistant|><think></think>" -> "</think>"
    end = turn.text.slice(max(0, start - _MAX_OPENING - len(generation)), start)
    _, separator, opening = end.rpartition(generation or " ")
    return between + opening if generation and separator and len(opening) <= _MAX_OPENING else None
