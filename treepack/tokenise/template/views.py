"""Stand-ins for the messages, the namespaces and the variable `loop` of a tracked template.

Each reports to an `_IterationReads` the values that an iteration depends on: the number of messages, and values from
before the loop. Uses that cannot be reported raise `UntrackedTemplate`, and then the template is rendered without
tracking. `same` compares the values of a variable in two renderings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from jinja2.runtime import Macro, Undefined
from markupsafe import Markup

from treepack.tokenise.template import sandbox

MISSING: Any = type("Missing", (), {"__slots__": ()})()  # the value of an attribute that a namespace does not have
_SCALARS = frozenset({str, int, bool, type(None), Markup})
_ATTRIBUTES = "_Namespace__attrs"  # where jinja2's Namespace has its attributes


class UntrackedTemplate(BaseException):
    """The template does something whose dependencies are unknown. No handler of `Exception` may catch it."""


class _IterationReads(Protocol):
    """Values that the current iteration has read."""

    items: list[Any]
    size: int
    is_recording: bool

    def at_least(self, number: int) -> None:
        """Report that the iteration would be the same with `number` messages or more."""

    def at_most(self, number: int) -> None:
        """Report that the iteration would be the same with `number` messages or fewer."""

    def register(self, namespace: Any) -> int:
        """Return the number of a new namespace, or -1 if it is local to an iteration."""

    def read(self, index: int, name: str, value: Any) -> None:
        """Report that an attribute was read."""

    def write(self, index: int, name: str, value: Any) -> None:
        """Report that an attribute was written."""


class MessageView:
    """The messages from number `_start` on, as a list that reports how many messages its reader depends on."""

    __slots__ = ("_reads", "_start")

    def __init__(self, reads: _IterationReads, start: int = 0) -> None:
        self._reads, self._start = reads, start

    def __len__(self) -> int:
        self._reads.at_least(self._reads.size)
        self._reads.at_most(self._reads.size)
        return max(0, self._reads.size - self._start)

    def __bool__(self) -> bool:
        return self._has(0)

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and index >= 0:
            if self._has(index):
                return self._reads.items[self._start + index]
            raise IndexError("list index out of range")
        if isinstance(index, slice):
            start, step = index.start, index.step
            is_end = index.stop is None and (step is None or step == 1)
            if is_end and (start is None or (type(start) is int and start >= 0)):
                return MessageView(self._reads, self._start + (start or 0))
        whole: Any = self._list()
        return whole[index]  # from the end, so it depends on the number of messages; or an error of lists

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while self._has(index):
            yield self._reads.items[self._start + index]
            index += 1

    def __reversed__(self) -> Iterator[Any]:
        backwards: Iterator[Any] = reversed(self._list())
        return backwards

    def _has(self, index: int) -> bool:
        """Return True if there is a message number `index` in this list."""
        if self._start + index < self._reads.size:
            self._reads.at_least(self._start + index + 1)
            return True
        self._reads.at_most(self._start + index)
        return False

    def _list(self) -> list[Any]:
        len(self)
        return self._reads.items[self._start : self._reads.size]

    def _refuse(self, *_: Any) -> NoReturn:
        raise UntrackedTemplate

    # Every other use of a list would depend on messages that no read has recorded.
    __contains__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __hash__ = __str__ = __repr__ = __format__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise UntrackedTemplate


def start_of(view: MessageView) -> int:
    """Return the number of the first message in `view`."""
    return view._start


class _TrackedLoop:
    """What both variables `loop` have in common: the messages from number `_start` on, and uses that are refused."""

    __slots__ = ("_reads", "_start")
    depth0, depth = 0, 1

    def __init__(self, reads: _IterationReads, start: int) -> None:
        self._reads, self._start = reads, start

    @property
    def length(self) -> int:
        return len(MessageView(self._reads, self._start))

    def _refuse(self, *_: Any) -> NoReturn:
        raise UntrackedTemplate

    __len__ = __iter__ = __call__ = _refuse
    __hash__ = __eq__ = __str__ = __repr__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise UntrackedTemplate


class LoopView(_TrackedLoop):
    """The variable `loop` of a loop over a `MessageView`, as far as templates may use it."""

    __slots__ = ("index0",)

    def __init__(self, reads: _IterationReads, start: int) -> None:
        super().__init__(reads, start)
        self.index0 = -1

    @property
    def index(self) -> int:
        return self.index0 + 1

    @property
    def first(self) -> bool:
        return self.index0 == 0

    @property
    def last(self) -> bool:
        return not self._has_next()

    @property
    def previtem(self) -> Any:
        if self.index0 == 0:
            return Undefined("there is no previous item")
        return self._reads.items[self._start + self.index0 - 1]

    @property
    def nextitem(self) -> Any:
        if self._has_next():
            return self._reads.items[self._start + self.index0 + 1]
        return Undefined("there is no next item")

    @property
    def revindex(self) -> int:
        return self.length - self.index0

    @property
    def revindex0(self) -> int:
        return self.length - self.index0 - 1

    def cycle(self, *values: Any) -> Any:
        if not values:
            raise TypeError("no items for cycling given")
        return values[self.index0 % len(values)]

    def _has_next(self) -> bool:
        index = self._start + self.index0 + 1
        if index < self._reads.size:
            self._reads.at_least(index + 1)
            return True
        self._reads.at_most(index)
        return False


class ReversedLoopView(_TrackedLoop):
    """The variable `loop` of a loop over a reversed `MessageView`; `position` is the number of a message in it."""

    __slots__ = ("position",)

    def __init__(self, reads: _IterationReads, start: int) -> None:
        super().__init__(reads, start)
        self.position = 0

    @property
    def index0(self) -> int:
        return self.length - 1 - self.position

    @property
    def index(self) -> int:
        return self.length - self.position

    @property
    def first(self) -> bool:
        return self.index0 == 0

    @property
    def last(self) -> bool:
        return self.position == 0

    @property
    def revindex0(self) -> int:
        return self.position

    @property
    def revindex(self) -> int:
        return self.position + 1


def namespace_class(reads: _IterationReads) -> type[sandbox.SandboxNamespace]:
    """Return the class `namespace` of a tracked template."""

    class TrackedNamespace(sandbox.SandboxNamespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            sandbox.SandboxNamespace.__init__(*args, **kwargs)
            object.__setattr__(args[0], "_number", reads.register(args[0]))

        def __getattribute__(self, name: str) -> Any:
            if name in (_ATTRIBUTES, "__class__"):
                return object.__getattribute__(self, name)
            values = attributes_of(self)
            value = values.get(name, MISSING)
            if reads.is_recording:
                reads.read(number_of(self), name, value)
            if value is MISSING:
                raise AttributeError(name)
            return value

        def __setitem__(self, name: str, value: Any) -> None:
            if reads.is_recording:
                reads.write(number_of(self), name, value)
            sandbox.SandboxNamespace.__setitem__(self, name, value)

        def __repr__(self) -> str:
            raise UntrackedTemplate  # it prints the attributes in the order in which they were set

        __str__ = __repr__

    return TrackedNamespace


def number_of(namespace: Any) -> int:
    """Return the number of a tracked namespace, or -1 if it is local to an iteration."""
    index: int = object.__getattribute__(namespace, "_number")
    return index


def attributes_of(namespace: Any) -> dict[str, Any]:
    """Return the attributes of a tracked namespace."""
    attributes: dict[str, Any] = object.__getattribute__(namespace, _ATTRIBUTES)
    return attributes


def is_plain(value: Any) -> bool:
    """Return True if `value` has no state and belongs to no rendering: JSON's types and what `undefined` is."""
    kind = type(value)
    if kind in _SCALARS or kind is float:
        return True
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, Undefined)


def is_comparable(value: Any) -> bool:
    """Return True if `same` can compare `value`: plain, or the messages, a namespace or a macro."""
    return value is MISSING or isinstance(value, MessageView | sandbox.SandboxNamespace | Macro) or is_plain(value)


def same(a: Any, b: Any) -> bool:
    """Return True if no template can distinguish `a` and `b`, the same variable in two renderings."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _SCALARS:
        return bool(a == b)
    if kind is float:
        return repr(a) == repr(b)  # 0.0 == -0.0, but they are printed differently
    if kind in (list, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if kind is dict:
        return len(a) == len(b) and all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    if kind is MessageView:
        return start_of(a) == start_of(b)
    if isinstance(a, sandbox.SandboxNamespace):
        return number_of(a) == number_of(b) >= 0
    if isinstance(a, Macro):
        return a._func.__code__ is b._func.__code__
    return isinstance(a, Undefined)  # they differ in the text of errors only, which ends a rendering
