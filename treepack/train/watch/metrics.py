"""The metrics of each optimiser step, in a file that survives a crash of the process that writes it.

    records --MetricsLog--> metrics.jsonl --read_metrics--> columns
       '----TensorBoardLog--> events of TensorBoard      (other trackers: `train.watch.sinks`)

    {"step":1,"epoch":0,"loss":2.31,"lr":1e-05,"skipped_rows":[]}       one line per step, steps ascending
    {"step":2,"epoch":0,"loss":null,"lr":1e-05,"skipped_rows":[7]}      null: the number was not finite
    {"step":3,"epo                                                      the process died here

A line is passed to the operating system before `write` returns. If the text after the last line end is not a record, it
is an unfinished line: readers ignore it, and a resumed run removes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import orjson

from treepack.errors import TreepackError, install_hint
from treepack.files.directory import finished_file


class MetricsLog:
    """A metrics file to which one process at a time appends one line per optimiser step.

    `num_lost` is the number of steps before a resumed run that have no line, as after a power cut.
    """

    def __init__(self, path: Path, *, keep_until: int | None) -> None:
        """Open the file; a crash during this leaves it unchanged.

        Args:
            path: the metrics file; its directory exists.
            keep_until: None for a new run. For a run resumed after this step: lines of later steps are removed, earlier
                lines stay byte for byte, and a missing file is created.

        Raises:
            TreepackError: a new run's file exists, a resumed run's file is damaged, or the disk fails.
        """
        self._path = path
        if keep_until is None and path.exists():
            raise TreepackError(f"{path} exists and a new run would add to it; resume that run or choose another --out")
        self.num_lost = keep_until or 0
        if keep_until is not None and path.exists():
            self.num_lost -= _remove_lines_after(path, keep_until)
        with _disk_errors(path):
            self._file = path.open("ab")  # appends, so that nothing is lost if two runs use one file by mistake

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line; numbers that are not finite become null.

        Args:
            record: JSON or numpy values by name, among them an integer `step` larger than that of the previous line.

        Raises:
            TreepackError: the disk fails.
        """
        assert isinstance(record.get("step"), int), "a record without a step cannot be dropped when a run is resumed"
        # orjson writes NaN and infinities as null; json would write NaN, which is not JSON.
        line = orjson.dumps(dict(record), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        with _disk_errors(self._path):
            self._file.write(line)
            self._file.flush()  # survives a killed process; fsync, against a power cut, would cost time in every step

    def close(self) -> None:
        """Close the file.

        Raises:
            TreepackError: the disk fails.
        """
        with _disk_errors(self._path):
            self._file.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by the name that trackers show: train/NAME, or eval/NAME for eval_NAME."""
    # {"step": 7, "loss": 2.31, "eval_loss": 2.5, "skipped_rows": []} -> {"train/loss": 2.31, "eval/loss": 2.5}
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in record.items()
        if name != "step" and _is_number(value)
    }


class TensorBoardLog:
    """The numbers of each optimiser step as `scalars` for TensorBoard."""

    def __init__(self, directory: Path, *, keep_until: int | None) -> None:
        """Open an event file in `directory`; TensorBoard hides the steps after `keep_until` of older files there.

        Raises:
            TreepackError: TensorBoard is not installed, or the disk fails.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TreepackError(f"TensorBoard cannot be used ({error}); {install_hint('tensorboard')}") from error
        self._directory = directory
        with _disk_errors(directory):
            # Each process writes a separate file. purge_step hides the steps that a resumed run computes again.
            self._writer = SummaryWriter(directory, purge_step=None if keep_until is None else keep_until + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the fields of a record of `MetricsLog.write` that are finite numbers.

        Raises:
            TreepackError: the disk fails.
        """
        with _disk_errors(self._directory):
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, record["step"])
            self._writer.flush()  # the default is every two minutes, and a crash would lose them

    def close(self) -> None:
        """Close the file.

        Raises:
            TreepackError: the disk fails.
        """
        with _disk_errors(self._directory):
            self._writer.close()


def read_metrics(path: Path) -> dict[str, list[Any]]:
    """Return the columns of a metrics file, which a run may still be writing to: one entry per step, None if missing.

    Raises:
        TreepackError: the file cannot be read, or a line is damaged.
    """
    records = [record for _, record in _lines(path)]
    # Names in the order in which they first occur: {"step", "loss"}, {"step", "kl"} -> step, loss, kl
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _is_number(value: object) -> bool:
    """Return true if `value` is a finite number; a boolean is not a number."""
    # True is an int, and so a Real, for Python; numpy's scalars are registered as Real too.
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _remove_lines_after(path: Path, keep_until: int) -> int:
    """Remove the lines of steps after `keep_until`; return the number of lines that stay.

    Raises:
        TreepackError: a line is damaged, or the disk fails.
    """
    lines = [line + b"\n" for line, record in _lines(path) if record["step"] <= keep_until]
    # Renamed over `path` when it is whole: a crash leaves the old file.
    with finished_file(path, overwrite=True) as temporary:
        temporary.write_bytes(b"".join(lines))
    return len(lines)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each line without its end, and its record."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TreepackError(
            f"{path}: cannot be read ({error.strerror}); expected the metrics.jsonl of a training run"
        ) from error
    last = 0
    for number, line in enumerate(lines, 1):
        record, problem = _parse(line)
        # b"{...}\n{...}\n" splits into two lines and b"", the end of a whole file; otherwise the last part is a line
        # that the process did not finish.
        if problem and number == len(lines):
            return
        if not problem and record["step"] <= last:
            problem = f"step {record['step']} comes after step {last}, so two runs wrote to this file"
        if problem:
            raise TreepackError(f"{path}:{number}: {problem}; remove the line, or restore the file from a copy")
        last = record["step"]
        yield line, record


def _parse(line: bytes) -> tuple[dict[str, Any], str]:
    """Return the record of a line, and its fault or an empty text."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return {}, f"malformed JSON ({error})"
    if not isinstance(record, dict):
        return {}, "not a JSON object"
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        return {}, "no valid step, which is an integer of at least 1"
    return record, ""


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a TreepackError about `path`."""
    try:
        yield
    except OSError as error:
        raise TreepackError(
            f"{path}: cannot be written ({error.strerror or error}); check that its disk is mounted and has free "
            "space, and resume the run"
        ) from error
