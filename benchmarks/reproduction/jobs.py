"""Run jobs side by side as processes until a deadline: each has a log, and the failure of one ends no other.

    [Job, ...] --run_jobs--> {name: Ended}      FOLDER/NAME.log, and FOLDER/NAME.done of each that ended well

    9 jobs with a share, 3 processes, 90 s left: each gets 30 s; if one ends after 10 s, the others get more

A job starts when a process is free and the job that it needs is made. Jobs with a share get `--minutes`: the time that
is left, divided by the number of jobs with a share that wait. At the deadline all are ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SHORTEST = 15.0  # seconds of a share with which a job is worth its start
GRACE = 5.0  # seconds between the request to end and the end by force
TELL = 15.0  # seconds between two lines about the progress


@dataclass(frozen=True, slots=True)
class Job:
    """A script of this folder with its arguments. `needs` is the name of the job that must be made before.

    `is_enough` returns True if the files of a job that did not end well are enough. `has_share` is True if the job
    takes `--minutes`.
    """

    name: str
    words: Sequence[str]
    needs: str | None = None
    is_enough: Callable[[], bool] = lambda: False
    has_share: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, in words, and its seconds."""

    state: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of all jobs: `processes` at a time, and a `deadline`, a time of `time.monotonic`.

    A job with a share starts at least `last` seconds before the deadline, which are for its last step.
    """

    processes: int
    deadline: float
    last: float = 0.0


@dataclass(slots=True)
class _Running:
    """A job that runs, and the time of `time.monotonic` at which it began, in seconds."""

    process: subprocess.Popen[bytes]
    begin: float = field(default_factory=time.monotonic)


def is_made(job: Job, folder: Path) -> bool:
    """Return True if a job ended well, or its files are enough."""
    return (folder / f"{job.name}.done").exists() or job.is_enough()


def run_jobs(
    jobs: Sequence[Job],
    folder: Path,
    limits: Limits,
    environment: Mapping[str, str],
    *,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Ended]:
    """Run the jobs that are not made, and return how each job ended.

    Args:
        jobs: in the order in which they start; a job that is needed comes before those that need it.
        folder: of the logs, which exists.
        limits: processes and time.
        environment: variables besides those of this process.
        tick: called several times a second.
    """
    ended = {job.name: Ended("existed") for job in jobs if is_made(job, folder)}
    waiting, running = [job for job in jobs if job.name not in ended], dict[str, _Running]()
    told = time.monotonic()
    while (waiting or running) and time.monotonic() < limits.deadline:
        for job in list(waiting):
            if job.needs in ended and not _is_good(ended[job.needs]):
                waiting.remove(job)
                ended[job.name] = Ended(f"not started, because {job.needs} failed")
            elif len(running) < limits.processes and (job.needs is None or job.needs in ended):
                minutes = _share(waiting, limits) / 60 if job.has_share else None
                if minutes is None or minutes * 60 >= SHORTEST:
                    waiting.remove(job)
                    running[job.name] = _Running(_start(job, minutes, folder, environment))
        if not running:
            break  # nothing can start any more
        _collect(running, ended, folder)
        if time.monotonic() > told + TELL:
            told = time.monotonic()
            print(f"{limits.deadline - told:.0f} s left, {len(waiting)} wait; {', '.join(running)}", flush=True)
        tick()
        time.sleep(0.1)
    for each in running.values():
        each.process.terminate()
    end = time.monotonic() + GRACE
    while any(each.process.poll() is None for each in running.values()) and time.monotonic() < end:
        time.sleep(0.05)
    for name, each in running.items():
        each.process.kill()
        each.process.wait()
        ended[name] = Ended("ended by the deadline", time.monotonic() - each.begin)
    return ended | {job.name: Ended("not started, because no time was left") for job in waiting}


def _is_good(ended: Ended) -> bool:
    return ended.state in ("existed", "done")


def _share(waiting: Sequence[Job], limits: Limits) -> float:
    """Return the seconds of the next job with a share."""
    left = limits.deadline - time.monotonic() - limits.last
    num = sum(job.has_share for job in waiting)
    return min(left, left * limits.processes / num)


def _start(job: Job, minutes: float | None, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    script, *words = job.words
    more = [] if minutes is None else ["--minutes", f"{minutes:.3f}"]
    # One thread each: all cores have a process of their own.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
    with (folder / f"{job.name}.log").open("wb") as log:
        command = [sys.executable, str(HERE / script), *words, *more]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)


def _collect(running: dict[str, _Running], ended: dict[str, Ended], folder: Path) -> None:
    for name, each in list(running.items()):
        code = each.process.poll()
        if code is None:
            continue
        del running[name]
        state = "done" if code == 0 else f"failed with {code}"
        ended[name] = Ended(state, time.monotonic() - each.begin)
        if code == 0:
            (folder / f"{name}.done").touch()
        else:
            print(f"{name} {state}: {last_line(folder / f'{name}.log')}", flush=True)


def last_line(path: Path) -> str:
    """Return the last line of a log that has words, at most 150 characters; empty without a log."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    written = [line.strip() for line in lines if line.strip()]
    return written[-1][:150] if written else ""
