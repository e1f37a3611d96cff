"""Standard streams of the command: nothing foreign reaches a terminal, and a stream that fails is one sentence.

    with standard_streams(): ...      sys.stdout and sys.stderr of the block

    closed by the caller              as if they led to /dev/null
    stdout cannot be written          TreepackError, for example on a full disk
    stderr cannot be written          ignored: there is no other place for a message
    control characters                written as escapes: all in lines on stderr, and most elsewhere

A file of rollouts, a template or a server decides what names and messages contain, and an escape sequence in them could
change the title of the terminal, its clipboard, or lines that are already there.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from treepack.errors import TreepackError

_T = TypeVar("_T")

# Bars of tqdm need \r and ESC [A, and colours are ESC [...m.
_HARMLESS = r"\x1b\[[0-9;]*m|\x1b\[[AK]"
_CONTROL = re.compile(rf"({_HARMLESS})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@contextmanager
def standard_streams() -> Iterator[None]:
    """Replace sys.stdout and sys.stderr by guarded ones for the block."""
    _open_closed()
    before = sys.stdout, sys.stderr
    null = None if None not in before else Path(os.devnull).open("w")  # noqa: SIM115
    streams: list[Any] = [null if stream is None else stream for stream in before]
    out, err = streams
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # a name may have characters that the terminal's encoding lacks
    guarded: list[Any] = [
        _Stream(out, _escaped_controls if _is_terminal(out) else str),
        _Stream(err, _escaped_line, silent=True),
    ]
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream, guard in zip(streams, guarded, strict=True):
            if guard.has_failed:
                # Drop the rest of the buffer. Otherwise Python writes it again when it exits, and prints a traceback.
                with suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """Return `text` with escapes for the characters that could drive a terminal: a tab becomes backslash t."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Stream:
    """A text or binary stream that raises a TreepackError if it cannot be written, or nothing if it is silent.

    If the reader has closed the pipe, click ends the command without an error.
    """

    def __init__(self, stream: Any, escape: Callable[[str], str], *, silent: bool = False) -> None:
        self._stream = stream
        self._escape = escape
        self._is_silent = silent
        self._failed = [False]  # shared with the buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def has_failed(self) -> bool:
        return self._failed[0]

    @property
    def buffer(self) -> Any:
        """The binary stream below, with the same guard: click writes bytes there."""
        below = _Stream(self._stream.buffer, self._escape, silent=self._is_silent)
        below._failed = self._failed
        return below

    def write(self, text: Any) -> Any:
        return self._try(lambda: self._stream.write(self._escape(text) if isinstance(text, str) else text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._failed[0] = True
            if self._is_silent:
                return None
            raise TreepackError(
                f"standard output: cannot be written ({error.strerror}); send it to a place with room"
            ) from error


def _escaped_controls(text: str) -> str:
    return _CONTROL.sub(lambda match: match[1] or match[0].encode("unicode_escape").decode(), text)


def _escaped_line(text: str) -> str:
    """Return text for stderr, escaped: a line has no colours, but a bar, which does not end a line, may have them."""
    # "note: a\x1b[31m\n" -> "note: a\\x1b[31m\n"     "\r 12%|###  |" and "\x1b[A" stay
    if not text.endswith("\n"):
        return _escaped_controls(text)
    return "".join(c if c in "\n\t" else printable(c) for c in text) if text.strip("\n") else text


def _is_terminal(stream: Any) -> bool:
    with suppress(OSError, ValueError):
        return bool(stream.isatty())
    return False


def _open_closed() -> None:
    """Open /dev/null in place of closed standard streams, so that no file of the command gets their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
