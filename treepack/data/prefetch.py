"""Rows read ahead of the model by a thread, so that the GPU does not wait for the disk.

    passes, tuples of row indices --Prefetch--> Batch, Batch, ...     decoded, joined, padded and pinned while an
                                                                      earlier pass is computed

The order of the rows is the caller's; the dataset does the reading.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from treepack.data.batch import Batch
from treepack.data.dataset import AHEAD_ROWS
from treepack.data.joined import join_rows
from treepack.data.mixture import AnyDataset

# Decoded passes that may wait. One is enough if all take equally long; the second covers for a pass that must decode a
# new row group.
_QUEUE_PASSES = 2


class Prefetch:
    """An iterator over chosen rows of a dataset, read by a thread; `waited` is the time in seconds spent in `next`.

    Call `close` to stop the thread early. If the thread fails on a row, `next` raises the error in place of that row.
    """

    def __init__(self, dataset: AnyDataset, passes: Iterable[Sequence[int]], *, pin: bool) -> None:
        """Start to read rows.

        Args:
            dataset: the rows.
            passes: indices into `dataset` of the rows of each batch, in the order to read them; none means padding.
            pin: copy rows to page-locked memory; use it if the model runs on a GPU.
        """
        self.waited = 0.0
        self._dataset, self._passes, self._pin = dataset, passes, pin
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(_QUEUE_PASSES)
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
            for rows in _announced(self._dataset, self._passes):
                if self._stop.is_set():
                    return
                batch = read_pass(self._dataset, rows)
                self._queue.put(batch.pin_memory() if self._pin else batch)
        except Exception as error:  # raised again in the thread that calls `next`
            last = error
        if not self._stop.is_set():
            self._queue.put(last)


def read_pass(dataset: AnyDataset, rows: Sequence[int]) -> Batch:
    """Return the rows of a pass, joined into one batch; padding if `rows` is empty.

    Raises:
        TreepackError: if a row cannot be read.
    """
    if not rows:
        return dataset.padding()
    return join_rows([dataset[row] for row in rows], multiple=dataset.multiple)


def _announced(dataset: AnyDataset, passes: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yield `passes`, after the dataset got the numbers of their rows and of the rows that follow."""
    iterator = iter(passes)
    block = tuple(itertools.islice(iterator, AHEAD_ROWS // 2))
    while block:
        following = tuple(itertools.islice(iterator, AHEAD_ROWS // 2))
        dataset.expect([row for rows in block + following for row in rows])
        yield from block
        block = following
