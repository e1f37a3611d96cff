"""Signals that end a training run: the first lets its step end and writes a checkpoint, a second Ctrl-C aborts.

    SIGTERM, Ctrl-C    recorded; the run asks `received` after every step
    Ctrl-C again       KeyboardInterrupt, and nothing waits for a checkpoint that is being written

After the steps, signals are handled as before.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import click

from .stages import write_line

STOPPED = 3  # exit status of a run that a signal stopped, and that --resume continues
_LINE = "note: the run ends after this step, with a checkpoint; Ctrl-C again aborts it"


class StopSignals:
    """The signals that this process got while it trained."""

    def __init__(self, *, leads: bool) -> None:
        """Have none yet; the rank that `leads` writes a line after the first Ctrl-C."""
        # A handler only records the signal. Raising in it could interrupt a save or a collective of several ranks.
        self._received: list[int] = []
        self._leads = leads
        self._is_aborted = False

    def received(self) -> bool:
        """Return True after a signal."""
        return bool(self._received)

    def _handle(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and signal.SIGINT in self._received:
            self._is_aborted = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one ends a collective, which no exception reaches
            raise KeyboardInterrupt
        self._received.append(number)
        if number == signal.SIGINT and self._leads:
            # In a thread: the signal may have come in the middle of a line to stderr.
            Thread(target=write_line, args=(_LINE,), daemon=True).start()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals in the block, and as before after it."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except BaseException as error:
            # SIGTERM stays: torchrun sends it when a rank is lost, and the others would end without a sentence.
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            if self._is_aborted and isinstance(error, KeyboardInterrupt):
                _end_process()
            raise
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_until_the_end() -> None:
    """Ignore SIGTERM, which torchrun sends to the other ranks as soon as one rank has ended with `STOPPED`."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_process() -> None:
    """End the process at once, although a thread may write a checkpoint, for which Python would wait."""
    click.echo("Aborted!", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
