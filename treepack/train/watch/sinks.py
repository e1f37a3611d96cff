"""Trackers that show the numbers of metrics.jsonl: TensorBoard, Weights & Biases, trackio, and treepack's own page.

    StepMetrics.as_record() --Sinks.write--> tensorboard    OUT/tensorboard/
                                             wandb          OUT/wandb/ and the server that wandb is logged in to
                                             trackio        the local database of trackio (TRACKIO_DIR)
                                             page           a web server on this machine, until the run ends

    {"step": 7, "loss": 2.31, "eval_loss": 2.5, "skipped_rows": []}  ->  train/loss 2.31 and eval/loss 2.5 at step 7

metrics.jsonl is the record of a run, see `train.watch.metrics`; a tracker has a copy. A tracker that fails is left out
from then on, with one note, and never stops training. A resumed run continues the same run of the tracker, whose id is
in OUT/tracker.json.
"""

from __future__ import annotations

import io
import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from treepack.errors import TreepackError, install_hint
from treepack.files.directory import finished_file
from treepack.files.remote.stored_files import read_stored
from treepack.train.watch.metrics import TensorBoardLog, scalars

if TYPE_CHECKING:
    from treepack.train.saving.place import Place  # imports torch, and a check of names must not

_TRACKER = "tracker.json"
_PACKAGES = {"page": ("vl-convert", "report")}  # package and extra of trackers that are not named like them
_PAGE_SECONDS = 5  # for the page to show the last step


class _Sink(Protocol):
    """A tracker with an open run."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the finite numbers of a record of `MetricsLog.write`."""

    def close(self) -> None:
        """Finish the run."""


@dataclass(frozen=True)
class SinkRun:
    """Description of a run for its trackers.

    `project` and `name` group and name runs there. `run_id` is unique and the same for all processes of one run.
    `config` are JSON values. `done` is the number of steps that were done before this process, 0 for a new run. `note`
    is called with sentences for the user.
    """

    folder: Path
    project: str
    name: str
    run_id: str
    config: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    note: Callable[[str], None] = lambda _: None


class Sinks:
    """All trackers of a run; a tracker that fails is closed and left out, with a note."""

    def __init__(
        self,
        names: Sequence[str],
        run: SinkRun,
        note: Callable[[str], None],
        *,
        opened: Mapping[str, _Sink] = MappingProxyType({}),
    ) -> None:
        """Open the trackers of `SINKS` with these names, except for those that are `opened` already.

        Raises:
            TreepackError: a name is unknown.
        """
        check_sinks(names)
        self._note = note
        self._sinks: dict[str, _Sink] = {}
        for name in dict.fromkeys(names):  # each once
            try:
                self._sinks[name] = opened[name] if name in opened else SINKS[name](run)
            except Exception as error:  # code of other projects may raise anything
                self._leave_out(name, error)

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass a record to all trackers."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(record)
            except Exception as error:
                del self._sinks[name]
                self._leave_out(name, error)

    def close(self) -> None:
        """Finish the run in every tracker."""
        while self._sinks:
            name, sink = self._sinks.popitem()
            try:
                sink.close()
            except Exception as error:
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        self._note(f"{name} gets no more metrics ({reason}); metrics.jsonl has them all")


def tracker_id(place: Place) -> str:
    """Return the id of the run in `place` for trackers; a resumed run has the same one.

    Raises:
        TreepackError: tracker.json is damaged, or the store fails.
    """
    path = place.out / _TRACKER
    content = read_stored(path)
    if content is None:
        identifier = secrets.token_hex(4)
        with finished_file(place.folder / _TRACKER, overwrite=True) as temporary:
            temporary.write_text(json.dumps({"run_id": identifier}) + "\n")
        return identifier
    try:
        return str(json.loads(content)["run_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); remove it to report to a new run of the tracker") from error


def check_sinks(names: Sequence[str]) -> None:
    """Refuse unknown names, and trackers whose package is not installed.

    Raises:
        TreepackError: naming the tracker.
    """
    from importlib.util import find_spec

    for name in names:
        if name not in SINKS:
            raise TreepackError(f"report_to is {name!r}; expected one of {', '.join(SINKS)}")
        package, extra = _PACKAGES.get(name, (name, name))
        if find_spec(package.replace("-", "_")) is None:
            raise TreepackError(f"--report-to {name} needs {package}, which is not installed; {install_hint(extra)}")


class _Wandb:
    def __init__(self, run: SinkRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=run.folder,
            config=run.config,
            settings=wandb.Settings(silent=True),  # its lines would be written between the lines of the progress
        )

    def write(self, record: Mapping[str, Any]) -> None:
        # Steps that a resumed run computes again have equal values; wandb ignores them.
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, run: SinkRun) -> None:
        import trackio

        # Its runs have no id of the caller's choice, and two directories may have the same name: "out" -> "out-1f2e".
        name = f"{run.name}-{run.run_id[:4]}"
        with redirect_stdout(io.StringIO()):  # stdout is for the summary of the command
            self._run = trackio.init(
                project=run.project, name=name, config=run.config, resume="allow" if run.done else "never"
            )

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not `Run.finish`, after which trackio would finish the run again when the process ends


class RunPage:
    """The page of `treepack report --watch`, in a separate process that reads the files of the run.

    A server inside this process would compete with training for the interpreter. The process ends when its stdin ends:
    with `close`, or with this process.
    """

    def __init__(self, run: SinkRun) -> None:
        # -P: a folder named treepack in the current directory is not imported.
        command = [sys.executable, "-P", "-m", "treepack.report.live", str(run.folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # Its first line comes after a second of imports, for which no step waits.
        self._announcing = threading.Thread(target=self._announce, args=(run.note,), daemon=True)
        self._announcing.start()

    def _announce(self, note: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        if address := self._process.stdout.readline().strip():
            note(f"the page of this run is {address}")

    def write(self, record: Mapping[str, Any]) -> None:
        if self._process.poll() is not None:
            raise TreepackError(f"its process ended with status {self._process.returncode}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._announcing.is_alive():
            self._process.kill()  # it has no address yet, so no viewer
        try:
            self._process.wait(_PAGE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


SINKS: dict[str, Callable[[SinkRun], _Sink]] = {
    "tensorboard": lambda run: TensorBoardLog(run.folder / "tensorboard", keep_until=run.done),
    "wandb": _Wandb,
    "trackio": _Trackio,
    "page": RunPage,
}
"""The trackers by the name of their package, which is also the name of their extra; see `_PACKAGES` for others."""
