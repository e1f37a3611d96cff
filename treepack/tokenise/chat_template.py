"""Conversations to text by a chat template, with the spans of characters that the model generated.

    messages[:k]      P = template(..., add_generation_prompt)   <|user|>Hi<|end|><|assistant|>
    messages[:k + 1]  F = template(...)                          <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                                                                               ~~~~~~~~~~~~ trained

Each turn is rendered as its sampler saw it, without the messages after it, because templates rewrite earlier turns (for
example, they drop old reasoning). `template.answers` finds the text that the model wrote after P; if a template has
`{% generation %}` marks, the marks decide instead. A conversation that the template cannot render faithfully raises
`UnfaithfulError`; a template that no conversation can use is refused. `tokenization` turns the text into ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.tokenise.template.answers import TurnAnswer, TurnAnswers
from treepack.tokenise.template.forms import PROBE_TOOL, MessageForms
from treepack.tokenise.template.history import RenderedHistory
from treepack.tokenise.template.rendering import (
    TemplateFile,
    TemplateSetting,
    Tools,
    UnfaithfulError,
    check_syntax,
    render,
)
from treepack.tokenise.template.stops import (
    CUT_NOTE,
    PREFILL_NOTE,
    STOP_NOTE,
    StopTokens,
    after_prefill,
    no_stop_note,
)
from treepack.tokenise.template.texts import ChainedText
from treepack.trajectory import AnswerBounds, Chat

_CLOCK = re.compile(r"\bstrftime_now\b")  # the only clock that transformers gives to a template
_OPENING_NOTE = "assistant turn before the first user message not trained, because the chat template refuses its prompt"


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A trained assistant turn: the rendering up to its end, and the spans of characters in it that are trained.

    `index` counts the assistant messages from 0, and `message` counts all messages. `weight` is the loss weight.
    `marker` is the end of the text if that is the marker of the next role, which stops a sampler (`template.stops`).
    """

    index: int
    message: int
    text: ChainedText
    spans: tuple[tuple[int, int], ...]
    weight: float
    marker: str = ""


@dataclass(frozen=True, slots=True)
class _RenderedChat:
    """The trained turns of a conversation in order, and remarks about them to be counted, each once."""

    turns: list[RenderedTurn]
    notes: tuple[str, ...]


class ChatTemplate:
    """The chat template of one tokenizer, or of a file, and the forms of messages that it prints."""

    def __init__(self, tokenizer: Any, file: TemplateFile | None = None) -> None:
        """Take `file`, or else the tokenizer's templates for conversations with tools and without tools.

        Raises:
            TreepackError: there is no chat template, none of several is named default, or one is not valid Jinja.
        """
        self._plain, self._with_tools = (file.text, file.text) if file else _templates_of(tokenizer)
        self._special_tokens = tokenizer.special_tokens_map
        # A token may be added as special without a role such as eos, and a token with a role may not be marked special.
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple({token.content for token in added if token.special} | set(tokenizer.all_special_tokens))
        self._end, self._begin = (
            str(tokenizer.eos_token or ""),
            str(tokenizer.special_tokens_map.get("bos_token") or ""),
        )
        self._name = Path(file.path if file else str(tokenizer.name_or_path)).name
        self._forms: dict[tuple[str, bool], MessageForms] = {}  # (template, with tools or not) -> forms, probed once
        self._stops: dict[tuple[str, bool], StopTokens] = {}  # of the same keys

    def turns(self, chat: Chat, *, tools: Tools, source: str) -> _RenderedChat:
        """Render each assistant turn of `chat` that has a non-zero weight and generated text, as the last message.

        Each turn is rendered with all messages before it. Renderings share the text that the template repeats unchanged
        (`RenderedHistory`), so this is O(length of the conversation) for most templates, and O(turns * length)
        for the others.

        Raises:
            UnfaithfulError: the template refuses the messages, does not continue its own generation prompt, or leaves
                out text that the model wrote.
        """
        setting, forms = self._setting(chat, tools, source)
        forms.check(chat.messages, source)
        messages = [forms.convert(message) for message in chat.messages]
        answers = TurnAnswers(RenderedHistory(messages, setting), setting, forms, self._special, self._end)
        turns: list[RenderedTurn] = []
        notes: dict[str, None] = {}  # an ordered set
        refusal: UnfaithfulError | None = None
        index = -1
        for k, message in enumerate(chat.messages):
            index += message["role"] == "assistant"
            if chat.message_weights[k] == 0:
                continue
            try:
                where = f"{source}: turn {index + 1} (message {k + 1})"
                answer = answers.answer(k, message, where)
            except UnfaithfulError as error:
                # A greeting that a program put before the first question: no model generated it.
                if any(each["role"] == "user" for each in chat.messages[:k]) or k == len(messages) - 1:
                    raise
                refusal = error
                notes[_OPENING_NOTE] = None
                continue
            notes |= dict.fromkeys(answer.notes)
            if answer.spans:
                turn, remarks = self._turn(
                    answer, index, k, chat, self._stops[setting.template, tools is not None], where
                )
                turns += [turn] if turn.spans else []
                notes |= dict.fromkeys(remarks)
        if refusal and not turns:
            raise refusal
        return _RenderedChat(turns, tuple(notes))

    def _turn(
        self, answer: TurnAnswer, index: int, k: int, chat: Chat, stops: StopTokens, source: str
    ) -> tuple[RenderedTurn, tuple[str, ...]]:
        """Return message `k` as a turn that ends as its sampler ended it, and notes; no spans if nothing is trained."""
        message, marker, notes = chat.messages[k], "", tuple[str, ...]()
        bounds = (chat.message_bounds[k] if chat.message_bounds else None) or AnswerBounds()
        if chat.message_cuts is not None and chat.message_cuts[k]:
            answer, notes = stops.without_end(answer, message), (CUT_NOTE,)
        elif bounds.is_open or (bounds.stop is not None and not stops.is_end(bounds.stop, answer.trained_end())):
            answer, notes = stops.without_end(answer, message), () if bounds.is_open else (STOP_NOTE,)
        elif not stops.is_stopped(answer.trained_end()):
            marker = stops.marker(message, chat.messages[k + 1] if k + 1 < len(chat.messages) else None)
            if not stops.is_stopped(marker):
                notes = (no_stop_note(self._name),)
        if not answer.spans:
            return RenderedTurn(index, k, answer.text, (), 0.0), notes
        # The text ends with the last trained character: a newline after <|im_end|> belongs to the next prompt.
        start, end = answer.spans[-1]
        text = answer.text.prefix(end).plus(marker)
        spans = (*answer.spans[:-1], (start, end + len(marker)))
        if bounds.prefill:
            # <|assistant|>{"count": 7}<|end|> after the prefill {"count": -> trained " 7}<|end|>"
            first = after_prefill(answer, message, bounds.prefill, source)
            spans = tuple((max(a, first), b) for a, b in spans if b > first)
            notes = (*notes, PREFILL_NOTE)
        return RenderedTurn(index, k, text, spans, chat.message_weights[k], marker), notes

    def whole(self, chat: Chat, *, tools: Tools, source: str, prompt: bool = False) -> str:
        """Render all messages of `chat` at once, with `prompt` also the generation prompt.

        Raises:
            UnfaithfulError: the template refuses the messages.
        """
        setting, forms = self._setting(chat, tools, source)
        return render([forms.convert(message) for message in chat.messages], setting, prompt=prompt)

    def prompt(self, chat: Chat, *, tools: Tools, source: str) -> str:
        """Render all messages of `chat` and the generation prompt, after which a model continues.

        Raises:
            UnfaithfulError: the template refuses the messages, or leaves some of them out.
        """
        self._setting(chat, tools, source)[1].check(chat.messages, source)
        return self.whole(chat, tools=tools, source=source, prompt=True)

    @property
    def texts(self) -> tuple[str, str]:
        """The templates for conversations without and with tools, which may be the same."""
        return self._plain, self._with_tools

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens of the tokenizer, by one of which a turn may end."""
        return self._special

    def reads_clock(self, tools: Tools) -> bool:
        """Return True if the template for conversations with `tools` prints the date, so its text changes daily."""
        return _CLOCK.search(self._template(tools)) is not None

    def _template(self, tools: Tools) -> str:
        return self._plain if tools is None else self._with_tools

    def _setting(self, chat: Chat, tools: Tools, source: str) -> tuple[TemplateSetting, MessageForms]:
        template = self._template(tools)
        key = (template, tools is not None)
        if key not in self._forms:
            self._forms[key] = forms = MessageForms(TemplateSetting(source, template, tools, self._special_tokens))
            self._stops[key] = StopTokens(forms, self._special, self._begin, self._end)
        # Templates use bos_token and the like as variables; the conversation may set more, and overrides them.
        variables = self._special_tokens | (chat.chat_template_kwargs or {})
        return TemplateSetting(source, template, tools, variables), self._forms[key]


def _templates_of(tokenizer: Any) -> tuple[str, str]:
    """Return the templates of a tokenizer for conversations without tools and with tools."""
    named, name = tokenizer.chat_template, tokenizer.name_or_path
    if not named:
        raise TreepackError(
            f"{name}: the tokenizer has no chat template; give one (--chat-template FILE), use a tokenizer that has "
            "one, or token ids"
        )
    if isinstance(named, dict) and "default" not in named:
        raise TreepackError(
            f"{name}: none of the chat templates {', '.join(sorted(named))} is named default; rename one to default, "
            "or give one (--chat-template FILE)"
        )
    plain = str(tokenizer.get_chat_template())
    with_tools = str(tokenizer.get_chat_template(tools=[PROBE_TOOL]))
    for template in {plain: None, with_tools: None}:
        check_syntax(template, name)
    return plain, with_tools
