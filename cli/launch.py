"""The processes that torchrun started, before they have joined: which of them prints.

All ranks refuse a wrong option or wrong data with the same sentence, and torchrun ends all of them when one stops. So
the first rank prints at once, and the others wait: only a rank that stops alone lives long enough to print.
"""

from __future__ import annotations

import os
import re
import signal
import time

_WAIT = 3.0  # seconds; torchrun looks for stopped ranks ten times a second
_REFERENCE = re.compile(r"see the error of|another rank|its ranks differ")  # to the error of a different rank


def is_first_process() -> bool:
    """Return True without torchrun, and in the first of its processes."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_first_rank(sentence: str) -> None:
    """Wait before this rank prints the error `sentence`, so that a rank that knows the cause prints first."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    waits = 2 if _REFERENCE.search(sentence) else 0 if is_first_process() else 1
    if waits:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the end of a run's handler, which lets a step end first
        time.sleep(waits * _WAIT)
