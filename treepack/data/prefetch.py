"""Rows read ahead of the model by a thread, so that the GPU does not wait for the disk.

    row indices --Prefetch--> Batch, Batch, ...     decoded, padded and pinned while an earlier row is computed

The order of the rows is the caller's; the dataset does the reading.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from treepack.data.batch import Batch
from treepack.data.dataset import AHEAD_ROWS
from treepack.data.mixture import AnyDataset

# Decoded rows that may wait. One is enough if all rows take equally long; the second covers for a row that must decode
# a new row group.
_QUEUE_ROWS = 2


class Prefetch:
    """An iterator over chosen rows of a dataset, read by a thread; `waited` is the time in seconds spent in `next`.

    Call `close` to stop the thread early. If the thread fails on a row, `next` raises the error in place of that row.
    """

    def __init__(self, dataset: AnyDataset, rows: Iterable[int | None], *, pin: bool) -> None:
        """Start to read rows.

        Args:
            dataset: the rows.
            rows: indices into `dataset`, in the order to read them; None means a row of padding.
            pin: copy rows to page-locked memory; use it if the model runs on a GPU.
        """
        self.waited = 0.0
        self._dataset, self._rows, self._pin = dataset, rows, pin
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(_QUEUE_ROWS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treepack-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        """Return the iterator itself, over the remaining rows."""
        return self

    def __next__(self) -> Batch:
        """Return the next row.

        Raises:
            StopIteration: after the last row.
            TreepackError: if the row cannot be read.
        """
        start = time.perf_counter()
        item = self._queue.get()
        self.waited += time.perf_counter() - start
        if isinstance(item, Batch):
            return item
        self._queue.put(item)  # put None or the error back, so that every later `next` gets it too
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stop.set()
        # The thread may be blocked in `put` on a full queue: take rows out until it sees the flag.
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._queue.get(timeout=0.01)

    def _run(self) -> None:
        last: BaseException | None = None  # None marks the end of the rows
        try:
            for row in _announced(self._dataset, self._rows):
                if self._stop.is_set():
                    return
                batch = self._dataset.padding() if row is None else self._dataset[row]
                self._queue.put(batch.pin_memory() if self._pin else batch)
        except Exception as error:  # raised again in the thread that calls `next`
            last = error
        if not self._stop.is_set():
            self._queue.put(last)


def _announced(dataset: AnyDataset, rows: Iterable[int | None]) -> Iterator[int | None]:
    """Yield `rows`, after the dataset got to know them and those that follow."""
    iterator = iter(rows)
    block = tuple(itertools.islice(iterator, AHEAD_ROWS // 2))
    while block:
        following = tuple(itertools.islice(iterator, AHEAD_ROWS // 2))
        dataset.expect([row for row in block + following if row is not None])
        yield from block
        block = following
