"""Compile and run chat templates with jinja2 alone, as transformers does, but without importing transformers.

    compiled(text).render([plain_message(each) for each in messages], tools=..., prompt=True, variables={...})

A template is foreign code, so it runs in jinja2's sandbox and sees plain JSON values only: other objects have methods
that the sandbox does not check. Names that a template sees besides jinja2's own names:

    raise_exception, strftime_now, dict, namespace     functions
    tojson                                             a filter without HTML escapes, non-ASCII text as it is
    {% break %}, {% continue %}, {% generation %}      statements; the last one marks the text of the model

The tests compare every rendering with the installed transformers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from types import GeneratorType
from typing import Any

import jinja2.utils
import numpy as np
from jinja2 import TemplateError, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

Span = tuple[int, int]
Variables = Mapping[str, Any] | None

# Fields of a message that may contain its reasoning; templates read the first one, older data has the others.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_SCALARS = frozenset({str, int, float, bool, type(None)})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_COUNT = "_count_iterations"
# A loop over all messages in a loop over all messages may have 8,000 of them; loops of three ranges would not end.
MAX_ITERATIONS = 1 << 26


@lru_cache(maxsize=128)
def compiled(text: str) -> _CompiledTemplate:
    """Return the template of `text`; it is compiled once.

    Raises:
        TemplateSyntaxError: of jinja2.
    """
    return _CompiledTemplate(text)


class _CompiledTemplate:
    """A compiled chat template."""

    def __init__(self, text: str) -> None:
        """Compile `text`.

        Raises:
            TemplateSyntaxError: of jinja2.
        """
        self._environment = new_environment()
        self._template = self._environment.from_string(text)

    def render(
        self, messages: list[Any], *, tools: Any = None, prompt: bool = False, variables: Variables = None
    ) -> tuple[str, list[Span]]:
        """Render messages of `plain_message`, with `prompt` also the generation prompt.

        `tools` and `variables` are made plain here; the variable `documents` is a list of dicts. Returns the text and
        the spans of characters inside generation marks, in order.

        Raises:
            Exception: whatever the template raises.
        """
        inputs = plain_inputs(tools, variables)
        marks = self._environment.extensions[GenerationMarks.identifier]
        assert isinstance(marks, GenerationMarks)
        blocks, spans = list[str](), list[Span]()
        marks.blocks, marks.spans = blocks, spans
        self._environment.num_iterations = 0
        try:
            for block in self._template.generate(messages=messages, add_generation_prompt=prompt, **inputs):
                blocks.append(block)  # one by one, because a mark begins after the blocks so far
            return "".join(blocks), spans
        finally:
            marks.blocks = marks.spans = None


def plain_message(message: Any) -> Any:
    """Return `message` with plain values, and its reasoning under the names that templates read.

    {"reasoning": "R", ...} -> {"thinking": "R", "reasoning": "R", ..., "reasoning_content": "R"}

    Raises:
        TypeError: `message` is not a mapping.
    """
    message = plain(message)
    if not isinstance(message, dict):
        raise TypeError(f"Chat messages should be dicts, dataclasses or pydantic models, but got {message!r}.")
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def plain(value: Any) -> Any:
    """Return `value` made of JSON's types; it is not copied if it is already."""
    if type(value) in _SCALARS or _is_plain(value):
        return value
    if isinstance(value, str):  # of a subclass, for example an enum; so are the next two
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # of pydantic
        return plain(dump())
    return f"<{type(value).__name__}>"  # images and arrays: templates check only if they are present


def _is_plain(value: Any) -> bool:
    """Return True if `value` consists of JSON's types, and tuples, and of no subclass of them."""
    kind = type(value)
    if kind is dict:
        return all(type(key) in _SCALARS for key in value) and all(
            type(part) in _SCALARS or _is_plain(part) for part in value.values()
        )
    return kind in (list, tuple) and all(type(part) in _SCALARS or _is_plain(part) for part in value)


def plain_inputs(tools: Any, variables: Variables) -> dict[str, Any]:
    given: dict[str, Any] = plain(dict(variables or {}))
    if any(not isinstance(tool, dict) for tool in tools or ()):
        raise ValueError(
            "Tools should either be a JSON schema, or a callable function with type hints and a docstring suitable for "
            "auto-conversion to a schema."
        )
    if any(not isinstance(document, dict) for document in given.setdefault("documents", None) or ()):
        raise TypeError("Documents should be a list of dicts with 'title' and 'text' keys!")
    return {"tools": plain(tools)} | given


class GenerationMarks(Extension):
    """The statement {% generation %}: while a rendering collects `blocks`, the span of its text goes to `spans`."""

    tags = {"generation"}  # noqa: RUF012 (of the base class)

    def __init__(self, environment: ImmutableSandboxedEnvironment) -> None:
        super().__init__(environment)
        self.blocks: list[Any] | None = None  # text, or something as long as the text so far
        self.spans: list[Span] | None = None

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse until {% endgeneration %}."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _mark(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        text = caller()
        if self.blocks is not None and self.spans is not None:
            start = sum(map(len, self.blocks))
            self.spans.append((start, start + len(text)))
        return text


class EndlessTemplateError(TemplateError):
    """The loops of a template run too often."""


class _SandboxEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which looks up a key of a dict without asking for an attribute of that name first.

    A rendering that sets `num_iterations` to 0 first has at most MAX_ITERATIONS of all its loops.
    """

    num_iterations = 0

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        # for x in y  ->  for x in y | _count_iterations
        for loop in list(source.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _COUNT, [], [], None, None, lineno=loop.lineno, environment=self)
        return super()._generate(source, *rest, **options)

    def count_iterations(self, number: int) -> None:
        """Add `number` iterations; raise an EndlessTemplateError if they are too many."""
        self.num_iterations += number
        if self.num_iterations > MAX_ITERATIONS:
            raise EndlessTemplateError(f"its loops have more than {MAX_ITERATIONS:,} iterations")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`; if `obj` is a dict, this is usually a value."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def new_environment() -> _SandboxEnvironment:
    """Return an environment with everything that templates may use."""
    environment = _SandboxEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, loopcontrols])
    environment.filters |= {"tojson": _tojson, _COUNT: _count_iterations}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),  # noqa: A006
        "dict": _SafeDict(),
        "namespace": SandboxNamespace,
    }
    return environment


@pass_context  # so that no loop over a constant is counted while the template is compiled
def _count_iterations(context: Context, values: Any) -> Any:
    """Return `values` to loop over; the messages of `tracking`, whose length it must not read, as they are."""
    environment: Any = context.environment
    if isinstance(values, GeneratorType):  # of a filter such as map
        return _counted(values, environment)
    if type(values) in (range, list, tuple, str, dict):
        environment.count_iterations(len(values))
    return values


def _counted(values: Iterable[Any], environment: _SandboxEnvironment) -> Iterator[Any]:
    for value in values:
        environment.count_iterations(1)
        yield value


# The parameters of these functions have the names that templates use.
def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


class _SafeDict:
    """The function `dict` without the attributes of the type, through which code of a template could escape."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class SandboxNamespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that start with an underscore, through which code could escape."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=1) works, as in jinja2
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            SandboxNamespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        SandboxNamespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(
                f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
                "Please rename the attribute."
            )
