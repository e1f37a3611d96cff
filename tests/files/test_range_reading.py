"""Objects that are read once from their start: any read near the last place, and the hash of all bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.errors import TreepackError
from treepack.files.remote import range_reading
from treepack.files.remote.range_reading import ObjectReader

PLACE = "memory://bucket/object"


@pytest.fixture(autouse=True, scope="module")
def _empty_bucket_afterwards() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@given(
    content=st.binary(max_size=60),
    block=st.integers(1, 20),
    moves=st.lists(st.tuples(st.integers(-20, 30), st.integers(0, 40)), max_size=8),
)
def test_reads_return_the_bytes_of_the_object(content: bytes, block: int, moves: list[tuple[int, int]]) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/object", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_reading, "BLOCK", block)
        reader = ObjectReader(PLACE, len(content))
        largest = 0
        for move, size in moves:
            offset = max(0, largest + max(move, -block))
            largest = max(largest, offset)
            assert reader.read(offset, size) == content[offset : offset + size]
        assert ObjectReader(PLACE, len(content)).stream().read() == content
        assert reader.hexdigest() == hashlib.sha256(content).hexdigest()


def test_an_object_that_became_shorter_is_refused() -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/object", b"abc")
    with pytest.raises(TreepackError, match="memory://bucket/object: became shorter while it was read"):
        ObjectReader(PLACE, 5).hexdigest()
