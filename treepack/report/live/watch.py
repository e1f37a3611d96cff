"""A run that is watched: its steps, facts and curves up to date, and the next messages for its viewers.

RunWatch.poll()                 reads the news in the run's directory; one thread calls it again and again
RunWatch.wait(place, seconds)   the next message for a viewer at `place`, or None; any number of threads

ViewerPlace(view 3, 120 steps) --> "steps": the points of the steps after 120, if view 3 is still the one shown
                               --> "snapshot": charts and thinned points of all steps, if there is a newer view
                               --> "reset": the same after a resumed run has cut steps off

A viewer that lacks many steps, or comes from a different server, gets a snapshot.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from treepack.errors import TreepackError
from treepack.report.live.curves import MAX_NEW, CurveView
from treepack.report.live.facts import RunFacts, rows_fit, run_facts, shown_text
from treepack.report.live.metrics_tail import MetricsTail
from treepack.report.live.run_series import RunSeries
from treepack.report.live.run_state import RunFolder, RunState
from treepack.report.live.step_rollouts import RolloutTexts, read_steps, rollout_texts
from treepack.report.live.step_rows import ScheduledRows, open_run_rows

_MAX_RESUMES = 5  # notes about resumes that are shown
_MAX_CACHED = 4  # explorers in memory


@dataclass(frozen=True, slots=True)
class ViewerPlace:
    """The state of a viewer: the points of `num_steps` steps in the charts of view `view`, and facts `version`."""

    view: int = 0
    num_steps: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class _ViewerMessage:
    """A message for a viewer, as JSON, its place afterwards, and whether no other message follows."""

    event: str
    content: bytes
    place: ViewerPlace
    is_last: bool


class RunWatch:
    """A run directory that another process may be writing, and the state of its page."""

    def __init__(self, folder: RunFolder, *, tokenizer: str | None = None, text_limit: int | None = None) -> None:
        """Read the run as it is now.

        Args:
            folder: the run.
            tokenizer: tokenizer of its rows; by default the one they were made with.
            text_limit: maximum number of tokens shown as text; None for no text.

        Raises:
            TreepackError: a file of the run is a link, or cannot be read.
        """
        self.folder, self._tokenizer, self._limit = folder, tokenizer, text_limit
        self._tail, self.series = MetricsTail(folder.metrics), RunSeries()
        self._changed, self._reading = threading.Condition(), threading.Lock()
        self._state, self._resumes = RunState("waiting"), list[str]()
        self._closed = False
        self.rows: ScheduledRows | None = None
        self.texts: RolloutTexts | None = None
        self._rows_note = ""
        self._open_rows()
        self.view, self._view_number, self._version, self._is_reset = CurveView(self.series), 1, 0, False
        self.facts: RunFacts | None = None
        self.poll()

    def poll(self) -> None:
        """Read the new lines and the state, and wake the viewers if something has changed.

        Raises:
            TreepackError: metrics.jsonl is a link, or cannot be read.
        """
        with self._changed:
            before = int(self.series.steps[-1]) if len(self.series) else 0
            number, is_reset = len(self.series), False
            for record in self._tail.read_new():
                if record is None:
                    self.series.clear()
                    is_reset = True
                else:
                    self.series.add(record)
            state = self.folder.state()
            # Before the first step and after a reset, run.json may be that of another run in the same directory.
            if self.folder.record is None or state.kind == "starting" or is_reset or not before:
                self._refresh()
            if self.facts and state == self._state and len(self.series) == number and not is_reset:
                return
            self._state = state
            if is_reset:
                kept = min(before, int(self.series.steps[-1]) if len(self.series) else 0)
                if kept:
                    self._resumes = [*self._resumes, f"The run was resumed after step {kept:,}."][-_MAX_RESUMES:]
            self._check_rows()
            self.facts = run_facts(self.folder, self.series, state, self.rows, self._notes())
            if is_reset or self.view.is_outdated(self.series):
                self.view, self._is_reset = CurveView(self.series), is_reset
                self._view_number += 1
            self._version += 1
            self._changed.notify_all()

    def _refresh(self) -> None:
        """Read run.json and open its rows, if the run has written it since."""
        before = self.folder.record
        self.folder.refresh()
        if self.folder.record != before:
            self._open_rows()

    def _open_rows(self) -> None:
        self.rows, self._rows_note = None, ""
        # Not `clear`: a thread may be adding an explorer of the rows before.
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        if self.folder.record is None and not self.folder.metrics.exists():
            return  # the command has not opened its run yet
        try:
            self.rows = open_run_rows(self.folder.record or {}, self.folder.path)
            self.texts = rollout_texts(self.rows, name=self._tokenizer, limit=self._limit)
        except TreepackError as error:
            if self.rows is not None and self._tokenizer:
                raise
            self.rows, self._rows_note = None, f"Rollouts are not shown: {shown_text(str(error))}."

    def _check_rows(self) -> None:
        if self.rows is not None and not rows_fit(self.series, self.rows):
            self.rows, self._rows_note = None, "Rollouts are not shown: the rows of the steps are not known."

    def _notes(self) -> list[str]:
        tail, notes = self._tail, [*self._resumes]
        if tail.num_damaged:
            lines = "1 line" if tail.num_damaged == 1 else f"{tail.num_damaged:,} lines"
            notes.append(f"{lines} of metrics.jsonl cannot be read, the first is line {tail.first_damaged:,}.")
        return [*notes, self._rows_note] if self._rows_note else notes

    def wait(self, place: ViewerPlace, seconds: float) -> _ViewerMessage | None:
        """Wait for news after `place`, at most some seconds, and return the message about them or None."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._version != place.version, seconds):
                return None
            assert self.facts is not None
            now = ViewerPlace(self._view_number, len(self.series), self._version)
            facts = self.facts.as_record()
            missed = now.num_steps - place.num_steps
            if place.view != now.view or not 0 <= missed <= 2 * MAX_NEW:
                event = "reset" if self._is_reset and place.view else "snapshot"
                return _ViewerMessage(event, as_bytes(self.snapshot()), now, self._closed)
            new = self.view.new_data(self.series, place.num_steps) if missed else {}
            return _ViewerMessage("steps", as_bytes({"facts": facts, "data": new}), now, self._closed)

    def snapshot(self) -> dict[str, Any]:
        """Return everything that a page shows except the explorer, as JSON values."""
        assert self.facts is not None
        charts = [{"name": chart.name, "title": chart.title, "spec": chart.spec} for chart in self.view.charts]
        return {"facts": self.facts.as_record(), "charts": charts, "data": self.view.data(self.series)}

    def rollouts(self, step: int | None) -> bytes:
        """Return the explorer of the steps up to `step` as JSON; by default the last step that is done.

        Raises:
            TreepackError: the rows of the steps are not known, the step does not exist, or a row cannot be read.
        """
        with self._changed:
            rows, texts, cached = self.rows, self.texts, self._cached
        if rows is None or texts is None:
            raise TreepackError(self._rows_note or "the rows of the steps are not known")
        last = self.facts.last_step if self.facts else 0
        step = min(step or last, last)
        if not step:
            raise TreepackError("no step is done yet")
        with self._reading:  # one at a time: a step may have millions of tokens
            if step not in cached:
                cached[step] = as_bytes(read_steps(rows, step, texts).as_record())
                while len(cached) > _MAX_CACHED:
                    cached.popitem(last=False)
            return cached[step]

    def close(self) -> None:
        """Wake all viewers for the last message, and close the files."""
        with self._changed:
            self._closed = True
            self._version += 1
            self._changed.notify_all()
            self._tail.close()


def as_bytes(value: Any) -> bytes:
    """Return JSON; a lone surrogate, which has no UTF-8, becomes a question mark."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
