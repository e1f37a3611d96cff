"""Functions and classes that users write: import them by name, call them, and report their exceptions in one sentence.

    load_callable("rewards:score") -> the function score of rewards.py
    await call(score, "4", {"answer": 4}, where="prompts.jsonl:3, query 'q3'")

Plain functions run in worker threads, because a reward may take seconds and the event loop has other paths to serve.
Asynchronous functions run in the event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from treepack.errors import TreepackError, described

_Result = TypeVar("_Result")


def load_callable(name: str) -> Callable[..., Any]:
    """Import the function or class that `name` gives as "module:name", such as "rewards:score".

    Modules are searched in sys.path, and then in the current folder, which this call appends to it.

    Raises:
        TreepackError: no such module or name, the module raises, or the name is neither a function nor a class.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise TreepackError(f"{name!r} is not of the form module:name; write for example rewards:score")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        value: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in _parents(module_name):
            raise TreepackError(
                f"{name}: there is no module {error.name}; run treepack in the folder that contains it, or install it"
            ) from error
        raise TreepackError(f"{name}: importing {module_name} raised {described(error)}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [each for each in vars(value) if not each.startswith("_") and callable(getattr(value, each))]
            known = f"; it contains {', '.join(sorted(public)[:10])}" if public else ""
            raise TreepackError(f"{name}: {module_name} has no {attribute}{known}")
        value = getattr(value, part)
    if not callable(value):
        raise TreepackError(f"{name}: {attribute} has the type {type(value).__name__}; expected a function or a class")
    return value  # type: ignore[no-any-return]


def _parents(module: str) -> set[str]:
    # "a.b.c" -> "a", "a.b", "a.b.c"
    parts = module.split(".")
    return {".".join(parts[: size + 1]) for size in range(len(parts))}


def name_of_code(function: Any) -> str:
    """Return "module:name" of a function, class or bound method, and the type of any other callable."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


async def call(function: Callable[..., Any], *arguments: Any, where: str, **keywords: Any) -> Any:
    """Call a user's function, plain or asynchronous, and return its result. `where` is where an error occurred.

    If the caller is cancelled while a plain function runs, the cancellation waits until the function has returned:
    a thread cannot be stopped, and no other code may use its objects until then.

    Raises:
        TreepackError: the function raised, with `where`, its name, and the exception's type and message.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **keywords)
        result, error = await _in_thread(lambda: function(*arguments, **keywords))
        if error is not None:
            raise error
        return await result if inspect.isawaitable(result) else result
    except TreepackError as error:
        raise TreepackError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        raise TreepackError(f"{where}: {name_of_code(function)} raised {described(error)}") from error


async def uninterrupted(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await `work`; a cancellation of the caller waits until it has ended, so that its open files can be closed."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marks it as seen; the caller gets the cancellation
        raise


async def _in_thread(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    def outcome() -> tuple[Any, BaseException | None]:
        # A future cannot hold StopIteration, which an exhausted iterator raises, so exceptions are returned.
        try:
            return work(), None
        except (Exception, SystemExit) as error:
            return None, error

    return await uninterrupted(asyncio.to_thread(outcome))
