"""Files `.eval` of Inspect: a zip archive with a header and one JSON document per sample.

    header.json              {"version": 2, "eval": {"task": ..}, ..}
    samples/s1_epoch_1.json  {"id": "s1", "epoch": 1, ..}    -->   {"version": 2, "eval": {..}, "samples": [sample]}

Samples come one by one, each with the header, in the order of the archive. Entries are compressed with deflate or, by
Inspect since 2025, with zstd, which zipfile of Python 3.11 does not support.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa

from treepack.errors import TreepackError

_ZSTD = 93  # the number of zstd in the zip format
_LOCAL_HEADER = struct.Struct("<26x2H")  # before the bytes of an entry; it ends with the sizes of name and extra field
_START, _HEADER, _SAMPLES = "_journal/start.json", "header.json", "samples/"


def is_eval_file(data: bytes) -> bool:
    """Return True if `data` is a zip archive with the entries of a log of Inspect."""
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except Exception:  # another kind of archive, or a damaged one, which torch explains
        return False
    return _HEADER in names or _START in names


def read_eval_file(data: bytes, path: str, *, max_size: int) -> Iterator[dict[str, Any]]:
    """Yield a log with one sample for each sample of the file; without a sample, the header alone.

    Raises:
        TreepackError: an entry is damaged, or larger than `max_size` bytes.
    """
    archive = zipfile.ZipFile(io.BytesIO(data))
    names = archive.namelist()
    # A log that is not finished, or was interrupted, has no header yet, only its start.
    header = _document(archive, data, _HEADER if _HEADER in names else _START, path, max_size)
    if not isinstance(header, dict):
        raise TreepackError(f"{path}: the header is not an object; restore the file")
    # A sample that was run again is in the archive twice, and the later one counts; a dict keeps the first place.
    samples = dict.fromkeys(name for name in names if name.startswith(_SAMPLES) and name.endswith(".json"))
    if not samples:
        yield header | {"samples": []}
    for name in samples:
        yield header | {"samples": [_document(archive, data, name, path, max_size)]}


def _document(archive: zipfile.ZipFile, data: bytes, name: str, path: str, max_size: int) -> Any:
    where = f"{path}: {name}"
    entry = archive.getinfo(name)
    if entry.file_size > max_size:
        raise TreepackError(f"{where} has {entry.file_size:,} bytes; raise --max-record-size, or remove the sample")
    try:
        return orjson.loads(_unpack(archive, data, entry))
    except Exception as error:  # a damaged archive may make zipfile raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TreepackError(f"{where} is damaged ({reason}); restore the file") from error


def _unpack(archive: zipfile.ZipFile, data: bytes, entry: zipfile.ZipInfo) -> bytes:
    if entry.compress_type != _ZSTD:
        return archive.read(entry)
    name_size, extra_size = _LOCAL_HEADER.unpack_from(data, entry.header_offset)
    start = entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size
    packed = pa.BufferReader(data[start : start + entry.compress_size])
    return bytes(pa.CompressedInputStream(packed, "zstd").read(entry.file_size))
