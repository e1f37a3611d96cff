"""Options that several commands share, passed to each as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from treepack.errors import TreepackError

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")
Option = Callable[[F], F]


def option_group(name: str, options: Sequence[Option[Any]], make: Callable[..., Any]) -> Callable[[F], F]:
    """Add `options` to a command, which receives `make(**values of these options)` as the argument `name`.

        @option_group("search", [click.option("--effort"), click.option("--time-limit", type=float)], Search)
        def pack(search: Search) -> None: ...       search is Search(effort=..., time_limit=...)

    `make` runs when the command is called, so it may import what the command needs.
    """

    def decorate(command: F) -> F:
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


def as_usage(make: Callable[P, T]) -> Callable[P, T]:
    """Return `make` with its TreepackErrors as usage errors, for options that exclude each other."""

    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return make(*args, **kwargs)
        except TreepackError as error:
            raise click.UsageError(str(error)) from error

    return checked


def refuse_given(names: Sequence[str], reason: str) -> None:
    """Refuse the parameters `names` of this command if the user gave them; `reason` has {} for the option.

    Raises:
        UsageError: naming the option.
    """
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{reason.format(option)}; leave one of them out")
