"""Render one conversation up to each of its turns.

    prompt(k)         messages[:k], with the generation prompt
    before(k)         messages[:k]
    text(k)           messages[:k + 1], with its generation marks

The renderings share their common parts if the template can be tracked (`tracking`). If it cannot be, or raises,
each one is rendered alone, which also decides about errors.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from treepack.tokenise.template.rendering import Message, Span, TemplateSetting, render_with_marks
from treepack.tokenise.template.texts import ChainedText

if TYPE_CHECKING:
    from treepack.tokenise.template.tracking import TemplateTracker

MIN_MESSAGES = 8  # of a conversation whose renderings have enough in common
# Iterations for each message of a conversation, and this many more, after which its template is rendered as usual. The
# templates of trl need at most 6.
_MAX_ITERATIONS, _FREE_ITERATIONS = 24, 1000
_MarkedText = tuple[ChainedText, tuple[Span, ...]]  # a rendering and the spans of its generation marks, in order


class RenderedHistory:
    """The messages of a conversation, in the form that the template prints, and its renderings."""

    def __init__(self, messages: list[Message], setting: TemplateSetting) -> None:
        """Render nothing yet. `setting` is that of all renderings, except for its source."""
        self.messages = messages
        self.num_answers = [0, *accumulate(message["role"] == "assistant" for message in messages)]
        self._tracker: TemplateTracker | None = None
        if len(messages) >= MIN_MESSAGES:
            self._start_tracking(setting)

    def _start_tracking(self, setting: TemplateSetting) -> None:
        # Imported here, because importing jinja2 takes a while and token ids need no template.
        from treepack.tokenise.template.loops import PREFIX
        from treepack.tokenise.template.recorded_iterations import ConversationMemory
        from treepack.tokenise.template.sandbox import plain_inputs, plain_message
        from treepack.tokenise.template.tracking import tracked

        tracker = tracked(setting.template)
        if tracker is None or tracker.is_refused:
            return
        with suppress(Exception):  # an error of the inputs is raised again by the usual rendering
            self._inputs = plain_inputs(setting.tools, setting.variables)
            self._plain = [plain_message(message) for message in self.messages]
            names = {"messages", "add_generation_prompt"}
            if not any(name in names or name.startswith(PREFIX) for name in self._inputs):
                self._tracker, self._memories = tracker, ConversationMemory()

    def prompt(self, k: int, setting: TemplateSetting) -> ChainedText:
        """Render the first `k` messages with the generation prompt.

        Raises:
            UnfaithfulError: the template raises anything.
        """
        return self._rendered(k, None, setting, prompt=True)[0]

    def before(self, k: int, setting: TemplateSetting) -> ChainedText:
        """Render the first `k` messages.

        Raises:
            UnfaithfulError: the template raises anything.
        """
        return self._rendered(k, None, setting)[0]

    def text(self, k: int, setting: TemplateSetting, turn: Message | None = None) -> _MarkedText:
        """Render the first `k` messages and message `k`, or another `turn` in its place; return the marks too.

        Raises:
            UnfaithfulError: the template raises anything.
        """
        return self._rendered(k, turn, setting) if turn else self._rendered(k + 1, None, setting)

    def _rendered(self, k: int, turn: Message | None, setting: TemplateSetting, *, prompt: bool = False) -> _MarkedText:
        """Render the first `k` messages, and `turn`."""
        if shared := self._shared(k, turn, prompt=prompt):
            return shared
        messages = self.messages[:k] if turn is None else [*self.messages[:k], turn]
        text, spans = render_with_marks(messages, setting, prompt=prompt)
        return ChainedText(text), tuple(spans)

    def _shared(self, k: int, turn: Message | None, *, prompt: bool) -> _MarkedText | None:
        """Render as `_rendered` does, with the tracked template; None if that is impossible."""
        from treepack.tokenise.template.sandbox import plain_message
        from treepack.tokenise.template.views import UntrackedTemplate

        tracker = self._tracker
        if tracker is None or not tracker.lock.acquire(blocking=False):
            return None
        try:
            items = self._plain[:k] if turn is None else [*self._plain[:k], plain_message(turn)]
            result = tracker.render(self._memories, items, num_common=k, prompt=prompt, inputs=self._inputs)
        except UntrackedTemplate:
            self._tracker = None
            return None
        except Exception:  # the usual rendering finds the cause
            return None
        finally:
            tracker.lock.release()
        if self._memories.num_iterations > _MAX_ITERATIONS * len(self._plain) + _FREE_ITERATIONS:
            self._tracker = None
        return result
