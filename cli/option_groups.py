"""Options of commands, made from the fields of option classes, and groups of them that are passed as one value.

workers: int = option(1, "Processes that plan.", minimum=1)      a field of PackOptions
field_options(PackOptions, "workers")                             [--workers INTEGER RANGE  Processes that plan.]
option_group("options", ..., PackOptions)                         the command gets options: PackOptions
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field
from typing import Any, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from treepack.errors import TreepackError
from treepack.option_fields import OptionText, option_texts

from .choices import WordChoice
from .sizes import KINDS

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")
Option = Callable[[_F], _F]


def option_group(name: str, options: Sequence[Option[Any]], make: Callable[..., Any]) -> Callable[[_F], _F]:
    """Add `options` to a command, which receives `make(**values of these options)` as the argument `name`.

        @option_group("search", [click.option("--effort"), click.option("--time-limit", type=float)], Search)
        def pack(search: Search) -> None: ...       search is Search(effort=..., time_limit=...)

    `make` runs when the command is called, so it may import the modules that it needs.
    """

    def decorate(command: _F) -> _F:
        @functools.wraps(command)
        def collected(*args: Any, **kwargs: Any) -> Any:
            values = {key: kwargs.pop(key) for key in keys}
            return command(*args, **kwargs, **{name: make(**values)})

        before = len(getattr(collected, "__click_params__", []))
        decorated: Any = collected
        for option in reversed(options):
            decorated = option(decorated)
        # click keeps the parameters of a function in this list, the last added first on the page.
        keys = [parameter.name for parameter in decorated.__click_params__[before:]]
        return decorated  # type: ignore[no-any-return]

    return decorate


def field_options(owner: type, names: str | None = None, **changes: Mapping[str, Any]) -> list[Option[Any]]:
    """Return click options for fields of an option class.

    Args:
        owner: the class.
        names: of the fields, in the order of the page, separated by spaces; by default all that are options.
        changes: arguments of `click.option` by the name of a field; `name` renames the option.
    """
    known = {each.name: (each, text) for each, text in option_texts(owner)}
    chosen = list(known) if names is None else names.split()
    return [_field_option(*known[name], **changes.get(name, {})) for name in chosen]


def _field_option(field: Field[Any], text: OptionText, *, name: str | None = None, **changes: Any) -> Option[Any]:
    given: dict[str, Any] = {"help": text.help, "default": field.default, "show_default": field.default is not None}
    if field.default is False:
        given = {"help": text.help, "is_flag": True}
    elif field.name in KINDS:
        given |= {"type": KINDS[field.name], "metavar": KINDS[field.name].name}
    elif "type" not in changes:
        given["type"] = _click_type(str(field.type), text)
    return click.option(f"--{name or field.name.replace('_', '-')}", field.name, **(given | changes))


def _click_type(annotation: str, text: OptionText) -> Any:
    """Return the type of a field's values: "int | None" with a minimum of 1 -> IntRange(min=1)."""
    if text.choices is not None:
        return WordChoice(text.choices)
    kind = annotation.split(" ")[0]
    if text.minimum is None:
        return {"int": int, "float": float, "str": str}[kind]
    if kind == "float":
        return click.FloatRange(text.minimum, text.maximum)
    return click.IntRange(int(text.minimum), None if text.maximum is None else int(text.maximum))


def as_typed(message: str, command: click.Command) -> str:
    """Return an error with its names of fields written as options of `command`.

    A field of one word is also a word of English, so only the subject of a clause counts.
    """
    # "... and checkpoint_layers is 0; omit one" -> "... and --checkpoint-layers is 0; omit one"
    # "device is 'gpu'; expected ..." -> "--device is 'gpu'; expected ..."; not "packed is a directory", which is a path
    for option in _long_options(command):
        name = option[2:].replace("-", "_")
        if "_" in name:
            message = re.sub(rf"(?<![\w./'\"-]){name}(?![\w./'\"=])", option, message)
        else:
            message = re.sub(rf"(^|; ){name}(?= (?:is (?!a |or )|has |needs |and ))", rf"\1{option}", message)
    return message


def _long_options(command: click.Command) -> Iterator[str]:
    """Yield the options of a command and of its subcommands: "--lora-rank", ..."""
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("--"))
    for inner in getattr(command, "commands", {}).values():
        yield from _long_options(inner)


def as_usage(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return `make` with its TreepackErrors as usage errors, for options that exclude each other."""

    @functools.wraps(make)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return make(*args, **kwargs)
        except TreepackError as error:
            raise click.UsageError(as_typed(str(error), click.get_current_context().command)) from error

    return checked


def is_given(name: str) -> bool:
    """Return True if the user gave the parameter `name` of this command, in a file or on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def refuse_given(names: Sequence[str], reason: str) -> None:
    """Refuse the parameters `names` of this command if the user gave them; `reason` has {} for the option.

    Raises:
        UsageError: naming the option.
    """
    for name in names:
        if is_given(name):
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{reason.format(option)}; leave one of them out")
