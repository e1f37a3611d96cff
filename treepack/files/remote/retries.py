"""Try again while an object store does not answer, so that a run of days survives an outage of minutes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from treepack.files.remote.object_store import UnavailableError

_T = TypeVar("_T")

OUTAGE_SECONDS = 600.0  # a run ends when a store has not answered for this long
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0

_log = logging.getLogger("treepack")


def pauses(reason: str) -> Iterator[None]:
    """Sleep before each further attempt: 0.5 s, 1 s, 2 s, ... 30 s. The iterator ends after `OUTAGE_SECONDS`.

    `reason` is logged once.
    """
    start, pause = time.monotonic(), _FIRST_PAUSE
    _log.info("%s; trying again for %.0f minutes", reason, OUTAGE_SECONDS / 60)
    while (elapsed := time.monotonic() - start) < OUTAGE_SECONDS:
        time.sleep(min(pause, OUTAGE_SECONDS - elapsed))
        pause = min(2 * pause, _LONGEST_PAUSE)
        yield


def patiently(action: Callable[[], _T]) -> _T:
    """Return the result of `action`, which is repeated while the store does not answer.

    Raises:
        UnavailableError: it has not answered for `OUTAGE_SECONDS`.
        TreepackError: another error of `action`.
    """
    retries = None
    while True:
        try:
            return action()
        except UnavailableError as error:
            retries = retries or pauses(str(error))
            try:
                next(retries)
            except StopIteration:
                raise error from None
