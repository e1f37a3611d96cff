"""Rows read one ahead of the model, in a thread, so that the GPU does not wait for the disk.

rows in order --Prefetch--> Batch, Batch, ...     decoded, padded and pinned while the row before is computed
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from treepack.data.batch import Batch
from treepack.data.dataset import PackedDataset

_DEPTH = 2


class Prefetch:
    """An iterator over the given rows of a dataset; `waited` are the seconds that its user spent waiting for them.

    Close it to end its thread early. What the thread fails with is raised where the row would have come.
    """

    def __init__(self, dataset: PackedDataset, rows: Iterable[int | None], *, pin: bool) -> None:
        """Begin to read `rows`, indices into `dataset`; None is a row of padding. `pin` is for rows bound for a GPU."""
        self.waited = 0.0
        self._dataset, self._rows, self._pin = dataset, rows, pin
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(_DEPTH)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treepack-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        """The rows that are left."""
        return self

    def __next__(self) -> Batch:
        """The next row.

        Raises:
            StopIteration: after the last.
            TreepackError: it cannot be read.
        """
        began = time.perf_counter()
        item = self._queue.get()
        self.waited += time.perf_counter() - began
        if isinstance(item, Batch):
            return item
        self._queue.put(item)  # the end stays the end, and so does a failure
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._queue.get(timeout=0.01)

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            for row in self._rows:
                if self._stop.is_set():
                    return
                batch = self._dataset.padding() if row is None else self._dataset[row]
                self._queue.put(batch.pin_memory() if self._pin else batch)
        except Exception as error:  # it belongs to the thread that asked
            last = error
        if not self._stop.is_set():
            self._queue.put(last)
