"""A lack of memory is one sentence with the needed bytes, the free bytes, and the smallest plan."""

from __future__ import annotations

import re

import pytest
import torch

from treepack.fit.repeat import SharedShortageError, until_it_fits
from treepack.memory.shortage import MemoryShortageError, memory_errors

CPU = torch.device("cpu")
HUGE = 1 << 54  # bytes, more than any machine has: 16,777,216 GiB


def allocate(_: object = None) -> None:
    torch.empty(HUGE, dtype=torch.uint8)


def test_a_failed_allocation_names_the_bytes_that_are_needed_and_free() -> None:
    with pytest.raises(MemoryShortageError) as caught, memory_errors("in a row", "shorten it"):
        allocate()
    assert re.fullmatch(
        r"out of memory in a row, which needs at least 16777216\.0 GiB more, and [\d.]+ GiB are free; shorten it",
        str(caught.value),
    )
    assert caught.value.place == "in a row"


def test_the_end_of_all_plans_names_the_smallest_one_and_its_bytes() -> None:
    with pytest.raises(MemoryShortageError, match=r"^out of memory in step 3 with the smallest plan ") as caught:
        until_it_fits(allocate, 4, lambda plan, _: plan // 2 or None, CPU, place="in step 3", remedy="stop", words=str)
    assert re.search(
        r"plan \(1\), which needs at least 16777216\.0 GiB more, and [\d.]+ GiB are free; stop$", str(caught.value)
    )


def test_a_shortage_of_a_row_keeps_its_place_when_it_runs_again() -> None:
    notes = list[str]()

    def attempt(plan: int) -> int:
        if plan > 1:
            with memory_errors("in row 7", "shorten it"):
                allocate()
        return plan

    found = until_it_fits(
        attempt, 2, lambda plan, _: plan // 2, CPU, place="x", remedy="y", words=str, note=notes.append
    )
    assert found == (1, 1)
    assert notes == ["out of memory in row 7; it runs again with a smaller plan: 1"]


def test_an_error_without_a_size_names_the_free_bytes() -> None:
    expected = r"^out of memory in a row, and [\d.]+ GiB are free; shorten it$"
    with pytest.raises(MemoryShortageError, match=expected), memory_errors("in a row", "shorten it"):
        raise MemoryError
    assert SharedShortageError("out of memory on another rank", "on another rank").place == "on another rank"


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shape mismatch$"), memory_errors("in a row", "shorten it"):
        raise RuntimeError("shape mismatch")
