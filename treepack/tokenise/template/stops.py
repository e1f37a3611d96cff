r"""The bounds of the trained text of a turn: no prefill, and no end token that the sampler did not write.

    cut        <|assistant|>There are sev<|end|>\n       trained "There are sev", and nothing after it
    stop text  <|assistant|>Action: count<|end|>\n       the same after a stop string such as "Observation:"
    prefill    <|assistant|>{"count": 7}<|end|>\n        {"count": of the request is not trained
    marker     <|assistant|>Seven.<|user|>\nNuts?        trained "Seven.<|user|>": the next role is the stop token
    last turn  <|assistant|>Seven.                       "<|user|>" is appended, as a sampler would have ended there

Templates such as that of GLM-4.5 print no end token. Their models stop at the marker of the next role, which follows
the turn directly: after calls that of results, and after an answer that of the user. Probes find the markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from treepack.tokenise.template.answers import TurnAnswer
from treepack.tokenise.template.contents import text_forms
from treepack.tokenise.template.forms import CONTEXTS, PROBE_CONTENT, PROBE_TEXT, MessageForms, calls_of
from treepack.tokenise.template.reasoning_tags import inner_thought
from treepack.tokenise.template.rendering import (
    ANOTHER_TEMPLATE,
    GENERATION_MARK,
    Message,
    UnfaithfulError,
    is_json_object,
    render,
)

CUT_NOTE = "answer cut by a limit or a filter, its end token is not trained"
STOP_NOTE = "answer ended by a stop string, its end token is not trained"
PREFILL_NOTE = "prefilled beginning of an answer, not trained"
_PREFILL_CHANGED = "the chat template changes the prefilled beginning of an answer"
# "<|user|>" of a tokenizer that lacks it as a special token.
_CONTROL = r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]?>"
# Special tokens inside a turn, which end none: </tool_call>, <|tool_call_end|>, </think>. <|call|> ends one.
_INNER = re.compile(r"tool[_\u2581]calls?|think|thought|arg_|function", re.IGNORECASE)


def no_stop_note(template: str) -> str:
    """Return the note on turns without a stop token; `template` is the name of the template."""
    ends = f"the chat template {template} ends a turn without a special token of the tokenizer"
    return f"{ends}, so no stop token is trained"


def _end_of_text(printed: str, turn: Message, ends: tuple[str, ...]) -> int:
    """Return the number of characters of `printed`, the text of a turn, up to the end of the model's text."""
    for text in _last_texts(turn):
        for form in text_forms(text):
            if (index := printed.rfind(form)) >= 0:
                return index + len(form)
    # Complete calls, or text that the template changes: all but the end token.
    stem = printed.rstrip()
    end = max((token for token in ends if stem.endswith(token)), key=len, default="")
    return len(stem) - len(end)


def after_prefill(answer: TurnAnswer, turn: Message, prefill: int, source: str) -> int:
    """Return the place in the text of `answer` after the first `prefill` characters of the content of `turn`.

    Raises:
        UnfaithfulError: the template prints the content in another form.
    """
    start, end = answer.spans[0][0], answer.spans[-1][1]
    printed, content = answer.text.slice(start, end), str(turn["content"])
    for whole in dict.fromkeys((content, content.rstrip(), content.lstrip(), content.strip())):
        stripped = 0 if whole[:1] == content[:1] else len(content) - len(content.lstrip())
        for form, begun in zip(text_forms(whole), text_forms(content[stripped:prefill]), strict=True):
            if (index := printed.rfind(form)) >= 0:
                return start + index + len(begun)
    # A thought in the content, which a template prints in another form; the generation prompt may contain its tag.
    head = content[:prefill].strip()
    first = max(0, start - prefill)
    if (index := answer.text.slice(first, end).find(head)) >= 0:
        return max(start, first + index + len(head))
    raise UnfaithfulError(f"{source}: {_PREFILL_CHANGED}; {ANOTHER_TEMPLATE}", _PREFILL_CHANGED)


def _last_texts(turn: Message) -> Iterator[str]:
    """Yield the last text of `turn`, as it is and without whitespace around it; nothing if a whole call is last."""
    content = str(turn.get("content") or "")
    inner = inner_thought(content)
    text = inner.rest if inner else content
    if calls := turn.get("tool_calls"):
        arguments = calls[-1]["function"]["arguments"]
        text = arguments if isinstance(arguments, str) and not is_json_object(arguments) else ""
    elif not text.strip() and not inner:
        text = str(turn.get("reasoning_content") or "")
    yield from dict.fromkeys(each for each in (text, text.rstrip(), text.strip()) if each.strip())


class StopTokens:
    """The stop tokens of one template, with tools or without."""

    def __init__(self, forms: MessageForms, special: tuple[str, ...], bos: str, eos: str) -> None:
        """Take the `special` tokens of the tokenizer; probe nothing yet."""
        self._forms = forms
        self._ends = tuple(token for token in special if token and (token == eos or not _INNER.search(token)))
        known = sorted((token for token in special if token != bos), key=lambda token: (-len(token), token))
        self._marker = re.compile(r"\s*(" + "|".join([*map(re.escape, filter(None, known)), _CONTROL]) + ")")
        self._markers: dict[tuple[str, bool], str] = {}  # by the next role and whether the turn has calls

    def without_end(self, answer: TurnAnswer, turn: Message) -> TurnAnswer:
        """Return `answer` without the text that the template prints after the last text of `turn`, a cut answer."""
        start, stop = answer.spans[0][0], answer.spans[-1][1]
        end = start + _end_of_text(answer.text.slice(start, stop), turn, self._ends)
        return replace(answer, spans=tuple((a, min(b, end)) for a, b in answer.spans if a < end))

    def is_stopped(self, trained: str) -> bool:
        """Return True if the trained text of a turn ends with a token that stops a sampler."""
        return trained.rstrip().endswith(self._ends) if self._ends else False

    def is_end(self, stop: str, trained: str) -> bool:
        """Return True if the stop string `stop` is an end token, or ends the `trained` text of a turn."""
        return bool(text := stop.strip()) and (text in self._ends or trained.rstrip().endswith(text))

    def marker(self, turn: Message, following: Message | None) -> str:
        """Return the marker that the template prints directly after `turn`, before the message `following` if any.

        It is "" if the turn itself ends with a token, or if the template prints no such marker there.
        """
        if GENERATION_MARK.search(self._forms.setting.template):
            return ""  # the marks decide which text is trained
        has_calls = bool(turn.get("tool_calls"))
        role = ("tool" if has_calls else "user") if following is None else str(following["role"])
        key = (role, has_calls)
        if key not in self._markers:
            self._markers[key] = self._probe(role, has_calls)
        return self._markers[key]

    def _probe(self, role: str, has_calls: bool) -> str:
        if role == "assistant":
            return ""  # the header of the next turn of the assistant ends no turn
        setting = self._forms.setting
        turn: dict[str, Any] = {"role": "assistant", "content": PROBE_CONTENT}
        calls = calls_of([PROBE_TEXT])
        following: dict[str, Any] = {"role": role, "content": "probe"}
        if has_calls:
            turn |= {"content": "", "tool_calls": calls}
        if role == "tool":
            following |= {"tool_call_id": calls[0]["id"], "name": "probe"}
        for context in CONTEXTS:
            first = [self._forms.convert(each) for each in context]
            messages = [*first, self._forms.convert(turn)]
            with suppress(UnfaithfulError):
                header = render(first, setting, prompt=True).removeprefix(render(first, setting))
                ended = render(messages, setting)
                continued = render([*messages, self._forms.convert(following)], setting)
                match = self._marker.match(continued, len(ended)) if continued.startswith(ended) else None
                # A token that begins every message, also of the assistant, ends no turn.
                if match and not (self.is_stopped(ended) or _INNER.search(match[1]) or match[1] in header):
                    return match[0]
        return ""
