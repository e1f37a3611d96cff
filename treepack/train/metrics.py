"""What each optimiser step measured, as a file that outlives the process that writes it.

    records --MetricsLog--> metrics.jsonl --read_metrics--> columns
       '----TensorBoardLog--> events of TensorBoard

    {"step":1,"epoch":0,"loss":2.31,"lr":1e-05,"skipped_rows":[]}       one line per step, steps ascending
    {"step":2,"epoch":0,"loss":null,"lr":1e-05,"skipped_rows":[7]}      null: there was no finite number
    {"step":3,"epo                                                      a process died here

A line reaches the system before `write` returns. What stands after the last line end and is no record is a line that
was not finished; it does not count, and a resumed run removes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from treepack.errors import TreepackError
from treepack.files.directory import finished_file


class MetricsLog:
    """Appends one line per optimiser step to a metrics file, of which one process at a time is the writer."""

    def __init__(self, path: Path, *, keep_until: int | None) -> None:
        """Open the file, which a crash while it is opened leaves as it was.

        Args:
            path: the metrics file; its directory exists.
            keep_until: None for a new run. For one resumed after this step, lines of later steps are dropped and those
                up to it stay byte for byte; where the file is missing, it is begun.

        Raises:
            TreepackError: a new run's file exists, a resumed run's file is damaged, or the disk fails.
        """
        self._path = path
        if keep_until is None and path.exists():
            raise TreepackError(f"{path} exists and a new run would add to it; resume that run or choose another --out")
        if keep_until is not None and path.exists():
            _drop_after(path, keep_until)
        with _naming(path):
            self._file = path.open("ab")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line; numbers that are not finite become null.

        Args:
            record: JSON or numpy values under their names, among them an integer `step` above that of the line before.

        Raises:
            TreepackError: the disk fails.
        """
        assert isinstance(record.get("step"), int), "a record without a step cannot be dropped when a run is resumed"
        line = orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        with _naming(self._path):
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Give the file back.

        Raises:
            TreepackError: the disk fails.
        """
        with _naming(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardLog:
    """The numbers of each optimiser step as scalars `train/NAME` for TensorBoard."""

    def __init__(self, directory: Path, *, keep_until: int | None) -> None:
        """Open a file of events in `directory`; TensorBoard hides what older files there hold after `keep_until`.

        Raises:
            TreepackError: TensorBoard is not installed, or the disk fails.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TreepackError(f"TensorBoard cannot be used ({error}); pip install 'treepack[tensorboard]'") from error
        self._directory = directory
        with _naming(directory):
            self._writer = SummaryWriter(directory, purge_step=None if keep_until is None else keep_until + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the fields of a record of `MetricsLog.write` that are finite numbers.

        Raises:
            TreepackError: the disk fails.
        """
        with _naming(self._directory):
            for name, value in record.items():
                if name != "step" and is_number(value):
                    self._writer.add_scalar(f"train/{name}", value, record["step"])
            self._writer.flush()

    def close(self) -> None:
        """Give the file back.

        Raises:
            TreepackError: the disk fails.
        """
        with _naming(self._directory):
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> dict[str, list[Any]]:
    """The columns of a metrics file, which may still be written: one entry per step, None where a line lacks the name.

    Raises:
        TreepackError: the file cannot be read, or a line is damaged.
    """
    records = [record for _, record in _lines(path)]
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def is_number(value: object) -> bool:
    """Whether `value` is a finite number, and not a truth value."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _drop_after(path: Path, keep_until: int) -> None:
    """Leave only the lines of steps up to `keep_until`."""
    kept = b"".join(line + b"\n" for line, record in _lines(path) if record["step"] <= keep_until)
    with finished_file(path) as temporary:
        temporary.write_bytes(kept)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line, without its end, and the record on it."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TreepackError(
            f"{path}: cannot be read ({error.strerror}); expected the metrics.jsonl of a training run"
        ) from error
    last = 0
    for number, line in enumerate(lines, 1):
        record, problem = _record(line)
        if problem and number == len(lines):
            return  # nothing, or a line that was not finished
        if not problem and record["step"] <= last:
            problem = f"step {record['step']} comes after step {last}, so two runs wrote here"
        if problem:
            raise TreepackError(f"{path}:{number}: {problem}; remove the line, or put the file back from a copy")
        last = record["step"]
        yield line, record


def _record(line: bytes) -> tuple[dict[str, Any], str]:
    """The record on a line, and what is wrong with it."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return {}, f"malformed JSON ({error})"
    if not isinstance(found, dict):
        return {}, "is no JSON object"
    step = found.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        return {}, "has no step, which is an integer of at least 1"
    return found, ""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn a failure of the disk into a sentence about `path`."""
    try:
        yield
    except OSError as error:
        raise TreepackError(
            f"{path}: cannot be written ({error.strerror or error}); see that its disk is there and has space, "
            "and resume the run"
        ) from error
