"""Limits of reading input files; without numerical libraries, because the command line takes them from here."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RECORD_SIZE = 1 << 30  # bytes of one record, decompressed; as Python values it takes about four times as much


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """Options of reading files."""

    max_size: int = MAX_RECORD_SIZE  # bytes of a record, and of a file that is read as a whole
    skip_bad: bool = False  # skip damaged records and files, which are refused otherwise


DEFAULT_LIMITS = RecordLimits()
