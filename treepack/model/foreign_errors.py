"""Exceptions of foreign code, of transformers or of a model, as errors of one sentence.

exception of foreign code  --translate_errors-->  an error of one sentence
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

from treepack.attention import IMPLEMENTATIONS
from treepack.errors import MODELS_HINT, TreepackError
from treepack.memory.shortage import is_memory_error

NO_INTERFACE = "its code does not use transformers' attention interface"
_MAX_MESSAGE = 200  # characters of a foreign error message: enough for its first sentence, short enough for one line


@contextmanager
def translate_errors(complaint: str, remedy: str) -> Iterator[None]:
    """Turn any exception of foreign code into a TreepackError of one sentence, with the exception as its cause.

    A lack of memory passes unchanged.

    Raises:
        TreepackError: instead of any other exception; a TreepackError raised inside passes unchanged.
    """
    try:
        yield
    except TreepackError:
        raise
    except Exception as error:  # code of a model may raise anything
        if is_memory_error(error):
            raise  # no fault of the model; the caller adds the remedy
        remedy = MODELS_HINT if one_line(error) == NO_INTERFACE else remedy
        raise TreepackError(f"{complaint} ({one_line(error)}); {remedy}") from error


def one_line(error: Exception) -> str:
    """Return the message of `error` as one short line."""
    # A model with a table of attention classes looks up our name in it: KeyError('treepack_reference').
    if isinstance(error, KeyError) and error.args and error.args[0] in IMPLEMENTATIONS.values():
        return NO_INTERFACE
    return shorten(str(error), _MAX_MESSAGE, placeholder=" ...") or type(error).__name__
