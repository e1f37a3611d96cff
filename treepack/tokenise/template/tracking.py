"""Render the beginnings of a conversation one after the other, and repeat only the iterations that may have changed.

    2 messages   head | user  assistant |                  generation prompt
    4 messages   head | ----  assistant  tool  assistant | generation prompt       ---- taken from the rendering before

An iteration of a loop over messages is a function of the values that it reads. While it runs, its reads are recorded:
other messages, the number of messages (`loop.last`, `messages|length`), and attributes of namespaces that were set
before the loop. It is taken from the rendering before if each of these reads has the same outcome now. Code
outside of such loops is run each time. Anything whose reads are unknown raises `UntrackedTemplate`. So the text is that
of the template by construction, and not because samples of it were compared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import lru_cache
from threading import Lock
from typing import Any

from jinja2 import TemplateSyntaxError, pass_context
from jinja2.runtime import Context, LoopContext

from treepack.tokenise.template import loops, sandbox
from treepack.tokenise.template.recorded_iterations import (
    UNLIMITED,
    ConversationMemory,
    IterationState,
    Key,
    LoopMemory,
    NeededValue,
    ReversedLoopMemory,
)
from treepack.tokenise.template.texts import ROOT, ChainedText
from treepack.tokenise.template.views import (
    MISSING,
    LoopView,
    MessageView,
    ReversedLoopView,
    UntrackedTemplate,
    attributes_of,
    is_comparable,
    is_plain,
    namespace_class,
    number_of,
    same,
    start_of,
)

Span = tuple[int, int]

_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
_MIRRORED = {"gt": "lt", "gteq": "lteq", "lt": "gt", "lteq": "gteq", "eq": "eq", "ne": "ne"}


@lru_cache(maxsize=128)
def tracked(text: str) -> TemplateTracker | None:
    """Return the tracked template of `text`, or None if it has no loop that can be tracked."""
    try:
        tracker = TemplateTracker(text)
    except (TemplateSyntaxError, RecursionError):  # the usual rendering reports them
        return None
    return tracker if tracker.loops else None


class TemplateTracker:
    """A template with tracked loops; it renders one conversation at a time."""

    def __init__(self, text: str) -> None:
        """Compile `text`.

        Raises:
            TemplateSyntaxError: of jinja2.
        """
        self._environment = environment = sandbox.new_environment()
        tree = environment.parse(text)
        self.loops = loops.change_loops(tree, environment)
        environment.globals["namespace"] = self._namespace = namespace_class(self)
        environment.filters |= {
            loops.LOOP: self._loop,
            loops.REVERSED: self._reversed,
            loops.COMPARE: self._compare,
            loops.POSITION: _position,
        }
        self._template = environment.from_string(tree)
        self._globals = dict(self._template.globals)
        self._extension = environment.extensions[sandbox.GenerationMarks.identifier]
        self.lock = Lock()  # of a rendering, because all of them share the state of this object
        self.is_refused = False  # True after the template did something that cannot be tracked
        self.items: list[Any] = []
        self.size = 0
        self.is_recording = False
        self._low, self._high = 0, UNLIMITED
        self._needs: dict[Key, Any] = {}
        self._writes: dict[Key, Any] = {}
        self._marks: tuple[Span, ...] = ()

    def render(
        self, memories: ConversationMemory, items: list[Any], *, num_common: int, prompt: bool, inputs: dict[str, Any]
    ) -> tuple[ChainedText, tuple[Span, ...]]:
        """Render all plain messages `items`; return the text and its generation marks.

        Every other rendering with `memories` has the same first `num_common` messages, and the same `inputs`.

        Raises:
            Untracked: the template cannot be tracked.
            Exception: whatever the template raises.
        """
        self._memories, self.items, self.size, self._num_common = memories, list(items), len(items), num_common
        self._prompt = prompt
        self._namespaces: list[Any] = []
        self._outputs: list[str] = []
        self._length, self._chunk, self._marks = 0, ROOT, ()
        extension: Any = self._extension
        extension.blocks, extension.spans = [self], []  # an open mark starts at len(self)
        self._spans: list[Span] = extension.spans
        self._environment.num_iterations = 0
        try:
            own = {"messages": MessageView(self), "add_generation_prompt": prompt}
            context = self._template.new_context({**self._globals, **own, **inputs}, shared=True)
            for output in self._template.root_render_func(context):
                self._outputs.append(output)
                self._length += len(output)
            return ChainedText("".join(self._outputs), self._chunk), self._all_marks()
        except UntrackedTemplate:
            self.is_refused = True
            raise
        finally:
            extension.blocks = extension.spans = None
            self.is_recording = False
            self.items, self._namespaces = [], []

    def __len__(self) -> int:
        """Return the number of characters that are rendered so far."""
        return self._length

    # Reads of the current iteration.

    def at_least(self, number: int) -> None:
        """Report that the iteration would be the same with `number` messages or more."""
        if number > self._low:
            self._low = number

    def at_most(self, number: int) -> None:
        """Report that the iteration would be the same with `number` messages or fewer."""
        if number < self._high:
            self._high = number

    def register(self, namespace: Any) -> int:
        """Return the number of a new namespace, or -1 if it is local to an iteration."""
        if self.is_recording:
            return -1
        self._namespaces.append(namespace)
        return len(self._namespaces) - 1

    def read(self, index: int, name: str, value: Any) -> None:
        """Report that an attribute was read."""
        key = (index, name)
        if index < 0 or key in self._writes or isinstance(self._needs.get(key), NeededValue):
            return
        if not is_comparable(value):
            raise UntrackedTemplate
        self._needs = {**self._needs, key: NeededValue(value)}

    def write(self, index: int, name: str, value: Any) -> None:
        """Report that an attribute was written."""
        if index >= 0:
            if not is_plain(value):
                raise UntrackedTemplate
            self._writes = {**self._writes, (index, name): value}

    def _compare(self, other: Any, order: str, holder: Any, name: str, is_left: bool) -> Any:
        """Return `other > holder.name`, or with `is_left` the sides exchanged; an integer is read as a range."""
        if type(holder) is self._namespace and self.is_recording and type(other) is int:
            key = (number_of(holder), name)
            value = attributes_of(holder).get(name, MISSING)
            if key[0] >= 0 and key not in self._writes and type(value) is int:
                order = _MIRRORED[order] if is_left else order
                need = self._needs.get(key, range(-UNLIMITED, UNLIMITED))
                if isinstance(need, range):  # else the exact value is needed already
                    new = _integers_of_outcome(order, other, value)
                    both = range(max(need.start, new.start), min(need.stop, new.stop))
                    self._needs = {**self._needs, key: both}
                return _ORDERS[order](other, value)
        value = self._environment.getattr(holder, name)
        return _ORDERS[order](value, other) if is_left else _ORDERS[order](other, value)

    # Loops.

    @pass_context
    def _loop(self, context: Context, iterated: Any, number: int) -> Any:
        """Return the pairs of message and `loop` for a loop over `iterated`."""
        if type(iterated) is not MessageView or self._marks or self._spans:
            return LoopContext(iterated, self._environment.undefined)
        return self._steps(number, start_of(iterated), self._variables(context, number))

    def _steps(self, number: int, start: int, variables: dict[str, Any]) -> Iterator[tuple[Any, LoopView]]:
        """Yield the messages of the iterations that must be run, after taking all others from memory."""
        memory = self._memory(number, start, variables)
        steps, is_kept = memory.steps, self._num_common == self.size
        known = len(steps)
        while known and not self._holds(steps[known - 1]):
            known -= 1
        step = steps[known - 1] if known else memory.root
        if is_kept:
            del steps[known:]
        self._repeat(step.writes)
        self._continue_after(step)
        loop, items = LoopView(self, start), self.items
        try:
            for i in range(known, max(0, self.size - start)):
                loop.index0 = i
                self._begin(step)
                self.at_least(start + i + 1)
                yield self.items[start + i], loop
                step = self._end()
                if is_kept:
                    steps.append(step)
                self._memories.num_iterations += 1
        finally:
            # Also if the template leaves the loop by break; but not if the loop of an earlier rendering is thrown away.
            if items is self.items:
                self.is_recording = False

    def _memory(self, number: int, start: int, variables: dict[str, Any]) -> LoopMemory:
        head = self._memories.chunks.after(self._chunk, "".join(self._outputs))
        key = (number, self._prompt if self.loops[number].reads_prompt else None)
        memory = self._memories.loops.get(key)
        if (
            memory is None
            or memory.root.chunk is not head
            or memory.start != start
            or memory.num_namespaces != len(self._namespaces)
            or not same(memory.variables, variables)
        ):
            root = IterationState(head, (), 0, UNLIMITED, {}, {})
            memory = self._memories.loops[key] = LoopMemory(root, start, variables, len(self._namespaces))
        return memory

    def _holds(self, step: IterationState) -> bool:
        """Return True if the iterations up to `step` would have the same outcome now, before the loop."""
        return (
            step.low <= self._num_common
            and self.size <= step.high
            and all(self._is_met(key, need) for key, need in step.needs.items())
        )

    def _is_met(self, key: Key, need: Any) -> bool:
        value = attributes_of(self._namespaces[key[0]]).get(key[1], MISSING)
        return type(value) is int and value in need if isinstance(need, range) else same(need.value, value)

    def _repeat(self, writes: dict[Key, Any]) -> None:
        for (index, name), value in writes.items():
            attributes_of(self._namespaces[index])[name] = value

    def _begin(self, step: IterationState) -> None:
        """Start to record an iteration after `step`."""
        self._low, self._high, self._needs, self._writes = step.low, step.high, step.needs, step.writes
        self.is_recording = True

    def _end(self) -> IterationState:
        """Return the state after the iteration that was recorded."""
        chunk = self._memories.chunks.after(self._chunk, "".join(self._outputs))
        step = IterationState(chunk, self._all_marks(), self._low, self._high, self._needs, self._writes)
        self._continue_after(step)
        return step

    def _continue_after(self, step: IterationState) -> None:
        self._chunk, self._marks, self._length = step.chunk, step.marks, step.chunk.end
        self._outputs.clear()
        self._spans.clear()

    def _all_marks(self) -> tuple[Span, ...]:
        return (*self._marks, *self._spans)

    def _variables(self, context: Context, number: int) -> dict[str, Any]:
        """Return the variables that the template has set and the loop may read."""
        names = self.loops[number].names
        variables = {name: value for name, value in context.vars.items() if name in names}
        if not all(map(is_comparable, variables.values())):
            raise UntrackedTemplate
        return variables

    @pass_context
    def _reversed(self, context: Context, iterated: Any, number: int) -> Any:
        """Return the pairs of message and `loop` for a loop over `iterated[::-1]`."""
        if type(iterated) is not MessageView or self._marks or self._spans:
            backwards = self._environment.getitem(iterated, slice(None, None, -1))
            return LoopContext(backwards, self._environment.undefined)
        variables = self._variables(context, number)
        memory = self._memories.reversed.get(number)
        if memory is None or memory.num_namespaces != len(self._namespaces) or not same(memory.variables, variables):
            memory = self._memories.reversed[number] = ReversedLoopMemory(variables, len(self._namespaces))
        return self._reversed_steps(memory, start_of(iterated), self.loops[number].attributes)

    def _reversed_steps(
        self, memory: ReversedLoopMemory, start: int, attributes: frozenset[str]
    ) -> Iterator[tuple[Any, ReversedLoopView]]:
        """Yield the messages from the last one on, until the outcome of the rest of the loop is known.

        `ReversedLoopMemory` explains the outcomes. An iteration is in memory only if it and all later ones depend on
        nothing but their keys.
        """
        run: list[tuple[tuple[object, ...], dict[Key, Any]]] = []
        outcome: dict[Key, Any] = {}
        loop, items = ReversedLoopView(self, start), self.items
        for i in range(self.size - start - 1, -1, -1):
            key = (start, i, *self._state(attributes))
            if start + i < self._num_common and key in memory.outcomes:
                outcome = memory.outcomes[key]
                self._repeat(outcome)
                break
            before = self._length
            loop.position = i
            self._memories.num_iterations += 1
            try:
                self._begin(IterationState(self._chunk, (), 0, UNLIMITED, {}, {}))
                yield self.items[start + i], loop
            finally:
                if items is self.items:
                    self.is_recording = False
            is_silent = self._length == before
            reads_no_later_message = self._low <= start + i + 1 <= self._num_common and self._high == UNLIMITED
            if is_silent and reads_no_later_message and all(name in attributes for _, name in self._needs):
                run.append((key, self._writes))
            else:
                run.clear()
        for key, writes in reversed(run):
            outcome = {**writes, **outcome}
            memory.outcomes[key] = outcome

    def _state(self, attributes: frozenset[str]) -> Iterator[object]:
        """Yield the attributes that a loop may read, of all namespaces."""
        for index, namespace in enumerate(self._namespaces):
            values = attributes_of(namespace)
            for name in sorted(attributes & values.keys()):
                value = values[name]
                if type(value) not in (str, int, bool, type(None)):
                    raise UntrackedTemplate
                yield (index, name, type(value), value)


def _integers_of_outcome(order: str, other: int, value: int) -> range:
    """Return the integers around `value` for which the comparison of `other` with them has the same result.

    For other = 5, the result changes at the bars:

        5 > v, 5 <= v     ... 3 4 | 5 6 7 ...
        5 >= v, 5 < v     ... 3 4 5 | 6 7 ...
        5 == v, 5 != v    ... 3 4 | 5 | 6 7 ...
    """
    first_after = {"gt": [other], "lteq": [other], "gteq": [other + 1], "lt": [other + 1]}
    changes = first_after.get(order, [other, other + 1])
    start = max((at for at in changes if at <= value), default=-UNLIMITED)
    return range(start, min((at for at in changes if at > value), default=UNLIMITED))


def _position(loop: Any) -> Any:
    """Return the number of the message of an iteration in the list that a loop goes through backwards."""
    return loop.position if type(loop) is ReversedLoopView else loop.length - 1 - loop.index0
