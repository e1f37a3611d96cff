r"""The text of one turn: its rendered prompt, the answer of the model, and the trained characters of the answer.

    P   rendering of the messages before the turn, with the generation prompt
    F   rendering of the messages with the turn

If F begins with P, the rest of F is the answer. Many templates rewrite earlier turns as soon as a new one follows, or
never repeat the thought that their generation prompt opens. Then F does not begin with P:

    P   <|user|>Hi<|assistant|><think>\n
    F   <|user|>Hi<|assistant|>Hello<|end|>

The sampler saw P, so the text is P, then the answer as the template prints it after a short conversation of probes:

    <|user|>Hi<|assistant|><think>\n   \n</think>\n\n   Hello<|end|>
    P                                  not trained      ~~~~~~~~~~~~ trained

A conversation of probes has no text of other messages, so the answer has none either.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from treepack.tokenise.template.contents import check_answer
from treepack.tokenise.template.forms import CONTEXTS, OTHER_TEXT, PROBE_TEXT, MessageForms, calls_of
from treepack.tokenise.template.history import RenderedHistory
from treepack.tokenise.template.reasoning_tags import (
    closes_thought,
    closing,
    count_closings,
    inner_thought,
    open_thought,
    without_empty_thought,
)
from treepack.tokenise.template.rendering import (
    ANOTHER_TEMPLATE,
    BAD_MARKS,
    GENERATION_MARK,
    Message,
    Span,
    TemplateSetting,
    UnfaithfulError,
    render,
)
from treepack.tokenise.template.texts import ChainedText

_NOT_CONTINUED = "the chat template does not continue its own generation prompt"
_NO_THINKING = "the generation prompt of the chat template excludes the reasoning of a turn"
_THINKING_REMEDY = f"set chat_template_kwargs of the rollout, such as enable_thinking, or {ANOTHER_TEMPLATE}"
_CLOSED_NOTE = "thought opened by the generation prompt closed without reasoning, untrained"
_EMPTY_NOTE = "assistant turn without text, reasoning or calls, not trained"
_PROBE_THOUGHT = "probe_thought"
_SEEN_END = 256  # characters at the end of a turn among which its end token is
_LONGEST_TAGS = 64  # characters of an opening and a closing tag, without whitespace: more than any of `thoughts`


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The text of a turn with its prompt, the trained spans of its characters (none: not trained), and notes."""

    text: ChainedText
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()

    @property
    def trained(self) -> str:
        """The trained text."""
        return "".join(self.text.slice(start, end) for start, end in self.spans)

    def trained_end(self) -> str:
        """Return the last characters of the last span, at least the longest special token; O(1) in the text."""
        start, end = self.spans[-1]
        return self.text.slice(max(start, end - _SEEN_END), end)


class TurnAnswers:
    """The answers of turns of one conversation, by one template and one tokenizer."""

    def __init__(
        self,
        history: RenderedHistory,
        setting: TemplateSetting,
        forms: MessageForms,
        special: tuple[str, ...],
        end: str,
    ) -> None:
        """Take the `special` tokens, by which turns end, and the token that is the `end` of a sequence or ""."""
        self._history, self._setting, self._forms, self._special, self._end = history, setting, forms, special, end
        self._longest_special = max(map(len, special), default=0)
        self._prompts: dict[int, str] = {}  # number of the context -> its prompt
        self._after_calls: str | None = None

    def answer(self, k: int, turn: Message, source: str) -> TurnAnswer:
        """Return the answer `turn`, which is message `k` of the history as the reader returned it.

        Raises:
            UnfaithfulError: the template refuses the messages, or leaves out text that the model wrote.
        """
        setting = replace(self._setting, source=source)
        answer = self._answer(k, turn, setting)
        if _repeats_thought(turn, answer.trained):
            answer = self._answer(k, _split(turn), setting, is_changed=True)
        try:
            return self._checked(answer, turn, setting)
        except UnfaithfulError:
            # DeepSeek's template leaves out the text of a second turn with calls, and prints it in a first one.
            with suppress(UnfaithfulError):
                return self._checked(self._rebuilt(self._history.prompt(k, setting), turn, setting), turn, setting)
            raise

    def _checked(self, answer: TurnAnswer, turn: Message, setting: TemplateSetting) -> TurnAnswer:
        if not answer.spans:
            return answer
        notes = check_answer(turn, answer.trained, end=self._end, source=setting.source)
        return replace(answer, notes=answer.notes + notes)

    def _answer(self, k: int, turn: Message, setting: TemplateSetting, *, is_changed: bool = False) -> TurnAnswer:
        """Return the answer `turn` in the place of message `k`, from which it may have been changed."""
        converted = self._forms.convert(turn) if is_changed else None
        prompt = self._history.prompt(k, setting)
        text, marks = self._history.text(k, setting, converted)
        if GENERATION_MARK.search(setting.template):
            return self._marked(prompt, turn, text, self._spans_of_turn(k, prompt, text, marks, setting), setting)
        if text.startswith(prompt):
            return self._spanned(text, len(prompt), len(prompt))
        return self._rebuilt(prompt, turn, setting)

    def _spans_of_turn(
        self, k: int, prompt: ChainedText, text: ChainedText, marks: tuple[Span, ...], setting: TemplateSetting
    ) -> tuple[Span, ...] | None:
        """Return the spans of the generation marks of turn `k` in `text`; None if they cannot be assigned to turns.

        Raises:
            UnfaithfulError: the last turn has no mark.
        """
        if len(marks) == self._history.num_answers[k + 1]:
            spans = marks[-1:]
        else:
            # Some turns have several marks, or none: the marks of the last turn start after the text of all others.
            texts = (self._history.before(k, setting) if k else ChainedText(""), prompt)
            before = next((each for each in texts if text.startswith(each)), None)
            if before is None:
                return None
            # From the last one back to the first that is no mark of this turn.
            spans = tuple(takewhile(lambda span: span[0] >= len(before), reversed(marks)))[::-1]
        if not spans:
            raise UnfaithfulError(
                f"{setting.source}: the chat template puts no generation mark on this turn; mark every assistant turn",
                BAD_MARKS,
            )
        return tuple(span for span in spans if span[1] > span[0])

    def _marked(
        self,
        prompt: ChainedText,
        turn: Message,
        text: ChainedText,
        spans: tuple[Span, ...] | None,
        setting: TemplateSetting,
    ) -> TurnAnswer:
        """Return the answer in the generation marks, or the rebuilt one if the template rewrites earlier turns."""
        if spans is None:
            with suppress(UnfaithfulError):
                return self._rebuilt(prompt, turn, setting)
            sentence = "the chat template has generation marks that cannot be assigned to turns; mark each turn once"
            raise UnfaithfulError(f"{setting.source}: {sentence}", BAD_MARKS)
        before = text.prefix(spans[0][0]) if spans else prompt
        # Marks may begin before the header of the turn, such as <|assistant|>, or after more than the header.
        if before.startswith(prompt) or prompt.startswith(before):
            return TurnAnswer(text, spans)
        return self._rebuilt(prompt, turn, setting)

    def _spanned(self, text: ChainedText, prompt: int, start: int, notes: tuple[str, ...] = ()) -> TurnAnswer:
        """Return the answer in `text` from the character `start` on; `prompt` is the length of the prompt."""
        # "...Hello<|im_end|>\n" -> trained up to <|im_end|>; "...Hello\n" without a special token -> up to the newline.
        first = max(0, prompt - self._longest_special)
        stripped = text.slice(first).rstrip()
        # If nothing follows the prompt, the special token at the end belongs to the prompt.
        ends_special = stripped.endswith(self._special) and first + len(stripped) > prompt
        end = first + len(stripped) if ends_special else len(text)
        return TurnAnswer(text, ((start, end),) if end > start else (), notes)

    def _rebuilt(self, prompt: ChainedText, turn: Message, setting: TemplateSetting) -> TurnAnswer:
        """Return `prompt` and the answer as the template prints it after a conversation of probes."""
        content = str(turn.get("content") or "")
        inner = inner_thought(content)
        thought = str(turn.get("reasoning_content") or "") or (inner.text if inner else "")
        calls = turn.get("tool_calls") or []
        if not (content.strip() or thought.strip() or calls):
            return TurnAnswer(prompt, (), (_EMPTY_NOTE,))
        end_of_prompt = prompt.ending(_LONGEST_TAGS)
        if thought.strip() and closes_thought(end_of_prompt):
            raise UnfaithfulError(f"{setting.source}: {_NO_THINKING}; {_THINKING_REMEDY}", _NO_THINKING)
        opening = open_thought(end_of_prompt)
        split = _split(turn) if opening and inner else turn
        body = self._printed(split, setting)
        before, notes = "", tuple[str, ...]()
        if opening and body.startswith(opening) and thought.strip() in body:
            body = body[len(opening) :]  # the template prints the thought, or an empty one, as its prompt began it
        elif opening:
            silent = {name: value for name, value in split.items() if name != "reasoning_content"}
            body = without_empty_thought(self._printed(silent, setting))
            if thought:
                body = thought.strip("\n") + (inner.closing if inner else self._closing(opening, setting)) + body
            else:
                before, notes = self._closing(opening, setting), (_CLOSED_NOTE,)
        if len(calls) == 1 and (end_of_calls := self._end_of_calls(setting)):
            body = body.rstrip() + end_of_calls
        return self._spanned(prompt.plus(before + body), len(prompt), len(prompt) + len(before), notes)

    def _printed(self, turn: Message, setting: TemplateSetting) -> str:
        """Return `turn` as the template prints it after a conversation of probes, without the header of the turn.

        Raises:
            UnfaithfulError: the template refuses such a conversation, or does not continue its generation prompt.
        """
        refusal: UnfaithfulError | None = None
        for number, context in enumerate(CONTEXTS):
            before = [self._forms.convert(message) for message in context]
            try:
                if number not in self._prompts:
                    self._prompts[number] = render(before, setting, prompt=True)
                prompt = self._prompts[number]
                text = render([*before, self._forms.convert(turn)], setting)
            except UnfaithfulError as error:
                refusal = refusal or error
                continue
            # "<|assistant|>\n<think>\n" -> the header is "<|assistant|>\n".
            header = prompt.removesuffix(open_thought(prompt))
            for start in (header, header.rstrip()):
                if start and text.startswith(start):
                    return text[len(start) :]
        raise refusal or UnfaithfulError(
            f"{setting.source}: {_NOT_CONTINUED}; use a template that does (--chat-template FILE), "
            "or one with {% generation %} marks",
            _NOT_CONTINUED,
        )

    def _closing(self, opening: str, setting: TemplateSetting) -> str:
        """Return the text between a thought and the text after it, as the template prints it if it prints thoughts."""
        probe = {"role": "assistant", "content": "probe_content", "reasoning_content": _PROBE_THOUGHT}
        printed = self._printed(probe, setting)
        _, is_printed, rest = printed.partition(_PROBE_THOUGHT)
        between, is_followed, _ = rest.partition("probe_content")
        return between if is_printed and is_followed else closing(opening)

    def _end_of_calls(self, setting: TemplateSetting) -> str:
        r"""Return the text that the template prints after the last of two calls and forgets after a single one.

        R1's template ends a turn after its second call only:

            one call   <calls><call>f</call>                                 -> "</calls><end>"
            two calls  <calls><call>f</call>\n<call>g</call></calls><end>
        """
        if self._after_calls is None:
            self._after_calls = ""
            with suppress(UnfaithfulError):  # the template refuses two calls
                one, two = (
                    self._printed({"role": "assistant", "content": "", "tool_calls": calls_of(arguments)}, setting)
                    for arguments in ([PROBE_TEXT], [PROBE_TEXT, OTHER_TEXT])
                )
                after_one, after_two = one.rpartition("probe_value")[2], two.rpartition("probe_other")[2]
                if "probe_other" in two and after_two.startswith(after_one):
                    self._after_calls = after_two[len(after_one) :]
        return self._after_calls


def _repeats_thought(turn: Message, answer: str) -> bool:
    """Return True if `answer` has the thought inside the content of `turn` twice, or an empty one before it.

    content   <think>Why?</think>Hi          answer   <think></think><think>Why?</think>Hi
    """
    content, recorded = str(turn.get("content") or ""), turn.get("reasoning_content")
    inner = inner_thought(content)
    if inner is None or (recorded and recorded != inner.text):
        return False
    is_copied = bool(recorded) and answer.count(inner.text) > content.count(inner.text)
    return is_copied or count_closings(answer) > count_closings(content)


def _split(turn: Message) -> Message:
    """Return `turn` with the thought inside its content as its reasoning."""
    inner = inner_thought(str(turn.get("content") or ""))
    if inner is None:
        return turn
    return turn | {"content": inner.rest, "reasoning_content": turn.get("reasoning_content") or inner.text}
