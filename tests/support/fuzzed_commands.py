"""Commands in this process, below the net that turns an unforeseen exception into a sentence.

outcome("stats", folder)  -->  "done", or "refused" with one sentence; anything else fails the test
"""

from __future__ import annotations

import contextlib
import io
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click

from treepack.errors import TreepackError

LONGEST = 3000  # characters of a sentence: a long text of a file is not printed whole
# The command line is installed under a name that is no folder of the project.
COMMANDS = import_module("treepack_cli").commands
OWN = Path(__file__).parents[2]


def outcome(*arguments: object) -> str:
    """Run a command; return "done" or "refused", and raise an AssertionError for any exception that is foreign."""
    names = [str(argument) for argument in arguments]
    return guarded(lambda: COMMANDS.main(names, "treepack", standalone_mode=False), " ".join(names))


def guarded(work: Callable[[], object], name: str) -> str:
    """Do `work` called `name` without output; the result is that of `outcome`."""
    silent = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except TreepackError as error:
        sentence = str(error)
        assert "\n" not in sentence, f"{name}: {sentence}"
        assert len(sentence) < LONGEST, f"{name}: {sentence}"
        return "refused"
    except (click.ClickException, click.Abort, SystemExit):
        return "refused"
    except BaseException as error:
        raise AssertionError(f"{name}: {type(error).__name__} at {_place(error)}: {str(error)[:300]}") from error
    return "done"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(OWN) and ".venv" not in frame.filename]
    return f"{Path(own[-1].filename).relative_to(OWN)}:{own[-1].lineno}" if own else "no line of the project"
