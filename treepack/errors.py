"""The one exception that treepack raises on purpose, and the remedies that several of its messages share.

Its message is one sentence for a person: the place, the problem and the remedy. The command line prints the message to
stderr and exits with status 1. Any other exception that reaches the user is a bug.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MODELS_HINT = "docs/models.md lists the models that treepack trains"


class TreepackError(Exception):
    """Bad input, bad options or damaged files; the message names the place, the problem and the remedy."""


def install_hint(extra: str) -> str:
    """Return the remedy for a missing package: the command that installs the optional dependencies `extra`.

    It names the packages with their bounds, as the metadata of the installed treepack has them.
    """
    import sys
    from importlib.metadata import PackageNotFoundError, requires

    try:
        needed = requires("treepack") or []
    except PackageNotFoundError:  # a folder on the path that was never installed
        return f"install the packages of the extra {extra} in treepack's pyproject.toml"
    # 'triton>=3.6; sys_platform == "linux" and extra == "train"' -> "'triton>=3.6'" on Linux
    pairs = [each.replace("'", '"').partition(";")[::2] for each in needed]
    wanted = [name for name, marker in pairs if f'extra == "{extra}"' in marker]
    other = {name for name, marker in pairs if "sys_platform" in marker and f'"{sys.platform}"' not in marker}
    return f"run pip install {' '.join(repr(name.strip()) for name in wanted if name not in other)}"


def torch_hint() -> str:
    """Return the remedy for a missing torch, whose build depends on the machine."""
    return f"{install_hint('train')}, with the index that https://pytorch.org names for this machine"


_MAX_SHOWN = 60  # characters of a value in an error


def quoted_value(value: object) -> str:
    """Return a value of a file for an error, cut if it is long."""
    try:
        text = repr(value[: _MAX_SHOWN + 1]) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or brackets inside of brackets
        return f"a large {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN + 2 else f"{text[:_MAX_SHOWN]}..."


_MAX_MESSAGE = 300  # characters of a foreign exception in an error


def described(error: BaseException) -> str:
    """Return the type and the message of a foreign exception in one line, cut if it is long."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # its __str__ fails
        message = ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."


@contextmanager
def foreign_code(complaint: str, remedy: str) -> Iterator[None]:
    """Turn anything that code outside of treepack raises in the block, sys.exit too, into an error of one sentence.

    Ctrl-C, the end of a generator, a lack of memory and a TreepackError pass unchanged.

    Raises:
        TreepackError: instead of the exception, which is its cause.
    """
    try:
        yield
    except (TreepackError, KeyboardInterrupt, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise TreepackError(f"{complaint} ({described(error)}); {remedy}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if the message is empty."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
