"""All of docs/reproduction.md on one GPU within a given time: probe, warm-ups, credit, and all training curves.

    python benchmarks/reproduction/run_all.py --out FOLDER [--minutes 9.5] [--processes 14] [--archive FILE.tar.gz]
    python benchmarks/reproduction/run_all.py --out FOLDER --tiny --processes 2 --minutes 200    for two CPU cores
    python benchmarks/reproduction/run_all.py --out FOLDER --dry-run       the same way with small numbers

    probe -> warm-up of each task -> credit of this task, and its runs of curves.py, side by side as processes

Runs start in the order of their seeds, and each gets an equal share of the time that is left. Every process appends to
its files, so what exists at the end of the time counts: the tables compare the runs up to the largest number of tokens
that all have reached. A process that fails ends no other; its output is in FOLDER/logs, and FOLDER/jobs.md has its last
line. The same command again makes what is missing.

`--archive` keeps records, tables and logs in one file, written again every minute, without the policies. `--mps` shares
the GPU through NVIDIA's MPS if that can be started. A machine without matplotlib writes no plots: unpack the archive
elsewhere and run the reports there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from curves_tables import is_evaluated
from jobs import HERE, Ended, Job, Limits, last_line, run_jobs
from mps import shared_gpu

from treepack.native.library import is_compiled

TASKS = ("steps", "maze")
TREES = ("grpo", "grpo-narrow", "treepo")
TRACE = ("trace-uniform", "trace-roots", "trace-prefixes", "trace")
PROS = ("pool-grpo", "pool-dynamic", "pool-random", "pros")
SETS = (
    ("curves", "steps", TREES),
    ("pros", "steps", PROS),
    ("trace", "maze", TRACE),
    ("curves", "maze", TREES),
    ("pros", "maze", PROS),
    ("trace", "steps", TRACE),
)
TOKENS = {"steps": 8e5, "maze": 2.4e5}  # decoded tokens of a run
TINY_TOKENS = {"steps": 1e6, "maze": 3e5}
DIALS = {"steps": ["--wanted", "0.22", "--set", "modulus=47"], "maze": ["--wanted", "0.25"]}
TINY = "--shape tiny --rate 3e-3 --batch 32"
TINY_DIALS = {
    "steps": f"{TINY} --wanted 0.4 --levels 2 3 4 5 6 --set modulus=11".split(),
    "maze": f"{TINY} --levels 5".split(),
}
CURVES = ["--evaluations", "5", "--eval-prompts", "256", "--eval-samples", "4"]
PROBE = 60.0  # seconds
LAST = 20.0  # seconds that a run has for its last step and evaluation
REPORTS = 15.0  # seconds
DRY = {
    "probe": ["--dry-run"],
    "warm-up": "--shape test --batch 8 --max-steps 2 --every 2 --prompts 4 --levels 5".split(),
    "credit": "--dry-run --pool 4 --prompts 2 --rollouts 8 --trees 4 --any-rate".split(),
    "curves": "--dry-run --tokens 300 --evaluations 1 --eval-prompts 4 --eval-samples 2".split(),
}


def main() -> None:
    """Run what is missing, write the tables, and print the state of each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5, help="time of the whole call")
    parser.add_argument("--processes", type=int, default=14, help="processes at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=[""], help="first letters of the names of jobs; all by default")
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--device", help="cuda or cpu; by default what torch finds")
    parser.add_argument("--tiny", action="store_true", help="short tasks and a policy of 0.1 million parameters")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes - REPORTS
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not is_compiled():
        print("note: treepack's loops are not compiled; carry treepack/native/loops.abi3.so, or run make", flush=True)
    probe, *others = [job for job in all_jobs(options) if job.name.startswith(tuple(options.only)) or not job.needs]
    keep = Archive(options.out, options.archive)
    with shared_gpu(wanted=options.mps) as environment:
        # Alone, because other processes would change its figures.
        ended = run_jobs([probe], logs, Limits(1, min(deadline, time.monotonic() + PROBE)), environment)
        limits = Limits(options.processes, deadline, 0.0 if options.dry_run else LAST)
        ended |= run_jobs(others, logs, limits, environment, tick=keep.write_sometimes)
    table = state_table(ended, logs)
    (options.out / "jobs.md").write_text(table)
    print(f"{write_tables(options.out)}\n{table}", flush=True)
    keep.write()


def all_jobs(options: argparse.Namespace) -> list[Job]:
    """Return the jobs in the order in which they start; the first is the probe."""
    dry = DRY if options.dry_run else {key: list[str]() for key in DRY}
    device = ["--device", options.device] if options.device else []
    policies, warm_ups, alignments = options.out / "policies", [], []
    for task in options.tasks:
        policy = str(policies / task)
        words = ["--task", task, "--out", policy, "--minutes", f"{0.18 * options.minutes:.3f}", "--workers", "3"]
        words += [*(TINY_DIALS if options.tiny else DIALS)[task], *device, *dry["warm-up"]]
        is_enough = (policies / task / "warm_up.json").exists
        warm_ups.append(Job(f"warm-up-{task}", ["warm_up.py", *words], is_enough=is_enough))
        words = ["--policy", policy, "--out", str(options.out / "credit"), *device, *dry["credit"]]
        alignments.append(Job(f"credit-{task}", ["credit.py", *words], needs=f"warm-up-{task}"))
    runs, tokens = [], TINY_TOKENS if options.tiny else TOKENS
    for seed in options.seeds:
        for name, task, arms in SETS:
            for arm in arms if task in options.tasks else ():
                folder = options.out / name
                words = ["--one", "--policy", str(policies / task), "--out", str(folder), "--arms", arm]
                words += ["--seeds", str(seed), "--tokens", str(tokens[task]), *CURVES, *device, *dry["curves"]]
                is_enough = partial(is_evaluated, folder / f"{task}-{arm}-{seed}.jsonl")
                runs.append(
                    Job(
                        f"{name}-{task}-{arm}-{seed}",
                        ["curves.py", *words],
                        needs=f"warm-up-{task}",
                        is_enough=is_enough,
                        has_share=True,
                    )
                )
    return [Job("probe", ["probe.py", *device, *dry["probe"]]), *warm_ups, *alignments, *runs]


def state_table(ended: Mapping[str, Ended], logs: Path) -> str:
    """Return how each job ended as a Markdown table; jobs that ended well and have no share are one line."""
    lines = ["| job | end | seconds | last line of its log |", "|---|---|---|---|"]
    for name, each in ended.items():
        last = "" if each.state in ("done", "existed") else last_line(logs / f"{name}.log").replace("|", "/")
        lines.append(f"| {name} | {each.state} | {each.seconds:.0f} | {last} |")
    return "\n".join(lines) + "\n"


def write_tables(folder: Path) -> str:
    """Write all tables of the records in `folder`, and return what the reports print."""
    commands = [
        ["credit.py", "--out", str(folder / "credit"), "--report"],
        ["curves.py", "--out", str(folder / "curves"), "--report"],
        ["curves.py", "--out", str(folder / "pros"), "--report"],
        ["curves.py", "--out", str(folder / "trace"), "--report"],
        ["pros_tables.py", str(folder / "pros")],
        ["trace_tables.py", str(folder / "trace")],
    ]
    # Side by side, because most of the time is the start of Python and torch.
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for script, *words in commands
    ]
    printed = [
        f"# {' '.join([script, *words])}\n\n{process.communicate()[0]}"
        for (script, *words), process in zip(commands, started, strict=True)
    ]
    text = "\n".join(printed)
    (folder / "tables.md").write_text(text)
    return text


class Archive:
    """The records, tables and logs of a folder in one file, written again after `every` seconds."""

    def __init__(self, folder: Path, path: Path | None, every: float = 60.0) -> None:
        """Start with the file that exists."""
        self._folder, self._path, self._every = folder, path, every
        self._written = time.monotonic()

    def write_sometimes(self) -> None:
        """Write if the last time is long ago."""
        if time.monotonic() > self._written + self._every:
            self.write()

    def write(self) -> None:
        """Write all small files; without a path nothing is written."""
        self._written = time.monotonic()
        if self._path is None:
            return
        kinds = (".jsonl", ".json", ".md", ".svg", ".log", ".done")
        files: Sequence[Path] = sorted(each for each in self._folder.rglob("*") if each.suffix in kinds)
        part = self._path.with_name(self._path.name + ".part")
        with tarfile.open(part, "w:gz") as archive:
            for each in files:
                archive.add(each, each.relative_to(self._folder))
        part.replace(self._path)


if __name__ == "__main__":
    main()
