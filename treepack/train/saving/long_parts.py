"""Lines in the log about a part of a run for which the run waits, so that it does not look as if it hangs.

    writing the checkpoint of step 300                     at its start
    writing the checkpoint of step 300: 20 s so far        every ten seconds, until it ends

A thread writes the later lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

INTERVAL = 10.0  # seconds between two lines
_log = logging.getLogger("treepack")


@contextmanager
def long_part(name: str, *, at_start: bool = True) -> Iterator[None]:
    """Log the `name` of the block, and every `INTERVAL` seconds how long it has run.

    Without `at_start`, a block that takes less than `INTERVAL` has no line.
    """
    if at_start:
        _log.info(name)
    start, ended = time.monotonic(), Event()

    def repeat() -> None:
        while not ended.wait(INTERVAL):
            _log.info("%s: %.0f s so far", name, time.monotonic() - start)

    thread = Thread(target=repeat, name="long part", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
