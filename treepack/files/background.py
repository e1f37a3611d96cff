"""A second thread that makes calls one at a time, while this thread prepares the arguments of the next call.

    this thread     prepare 0   prepare 1   prepare 2   wait
    second thread               call 0      call 1      call 2

Calls that release the GIL, such as encoding Parquet, then use a second core.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec

_P = ParamSpec("_P")


class BackgroundThread:
    """One background thread; at most one call is in work, and none waits.

    The end of the `with` block waits for the last call. If the block raises, so does the `with` statement.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._last: Future[object] | None = None

    def call(self, function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Start `function(*args, **kwargs)` after the call before has ended.

        Raises:
            Exception: the one that the call before raised.
        """
        self.wait()
        self._last = self._executor.submit(function, *args, **kwargs)

    def wait(self) -> None:
        """Wait for the last call.

        Raises:
            Exception: the one that it raised.
        """
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def __enter__(self) -> BackgroundThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._executor.shutdown()
