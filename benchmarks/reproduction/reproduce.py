"""All of README.md: policies, credit, training curves, and their tables, within a given time.

    python benchmarks/reproduction/reproduce.py --out FOLDER --minutes 15 --processes 16        one GPU
    python benchmarks/reproduction/reproduce.py --out FOLDER --size tiny --minutes 200          two CPU cores
    python benchmarks/reproduction/reproduce.py --out FOLDER --only curves-maze                 some of the tables
    python benchmarks/reproduction/reproduce.py --out FOLDER --only sums --minutes 15           SmolLM2; see sums.py
    python benchmarks/reproduction/reproduce.py --out FOLDER --dry-run                          small numbers, on a CPU

    policy of each task -> credit of this task, and a run for each table, arm and seed, side by side as processes

Runs start in the order of their seeds, and each gets an equal share of the time that is left. Every process appends to
its files, so all records at the end of the time count. A process that fails ends no other; its output is in
FOLDER/logs. The same command again makes the missing runs. On a GPU, start NVIDIA's MPS first
(`nvidia-cuda-mps-control -d`), so that the processes compute at the same time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from arms import Arm, PlainArm, Sizes, train
from credit import CreditSizes, measure
from policies import WarmUp, warm_up
from tables import Table, credit_table, is_evaluated, run_table
from tasks import TASKS

from treepack.errors import TreepackError

ARMS: dict[str, Arm] = {
    "grpo": PlainArm("grpo"),
    "grpo-narrow": PlainArm("grpo", narrow=True),
    "treepo": PlainArm("treepo", trees=True),
    "treerpo": PlainArm("treerpo", trees=True),
    "tree-grpo": PlainArm("tree-grpo", trees=True),
    "tree-flat": PlainArm("grpo", trees=True),
}
RATES = {"before": "pass rate before", "after": "after", "-after": "difference"}
COST = {"steps": "steps", "seconds": "s / step"}
CURVES = {
    **RATES,
    **{"area": "area", "-area": "difference of the area", "to_target": "tokens to the target"},
    **{"decoded_per_leaf": "decoded / leaf", **COST},
}
TABLES = {
    "curves": Table({"grpo": "grpo", "grpo-narrow": "grpo-narrow", "treepo": "treepo"}, CURVES),
    "sums": Table(
        {"grpo": "independent rollouts", "treepo": "trees"},
        CURVES | {"mixed_share": "groups with both outcomes", "shared": "tokens saved by the trie"},
    ),
}


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of a whole reproduction."""

    policies: Mapping[str, WarmUp]  # of each task
    tokens: Mapping[str, float]  # decoded tokens of a run
    steps: Mapping[str, Sizes]  # of a task; Sizes() by default
    credit: CreditSizes = field(default_factory=CreditSizes)


SIZES = {
    "small": Size(
        {
            "steps": WarmUp("small", 0.22, dial={"modulus": 47}),
            "maze": WarmUp("small", 0.25),
            "sums": WarmUp(None, 0.3, rate=3e-4, batch=128, rising=20, every=16, max_steps=160, prompts=256),
        },
        {"steps": 8e5, "maze": 2.4e5, "sums": 1.6e6},
        {"sums": Sizes(prompts=64, width=8, rate=1e-5)},
    ),
    "tiny": Size(
        {
            "steps": WarmUp("tiny", 0.4, rate=3e-3, batch=32, levels=(2, 3, 4, 5, 6), dial={"modulus": 11}),
            "maze": WarmUp("tiny", 0.28, rate=3e-3, batch=32, levels=(5,)),
        },
        {"steps": 1e6, "maze": 3e5},
        {},
    ),
    "dry": Size(
        {
            name: WarmUp("test", 1.0, batch=8, every=2, max_steps=2, prompts=4, levels=levels)
            for name, levels in (("steps", (2,)), ("maze", (5,)))
        },
        {"steps": 300, "maze": 300},
        {name: Sizes(prompts=4, width=4, eval_prompts=4, eval_samples=2, evaluations=1) for name in ("steps", "maze")},
        CreditSizes(prompts=1, rollouts=8, trees=2, width=4, pool=2, screen=2, lowest=0.0, highest=1.0),
    ),
}
LAST = 20.0  # seconds before the deadline for the last step and evaluation of a run
SHORTEST = 15.0  # seconds of a share with which a run is worth its start


@dataclass(frozen=True, slots=True)
class Job:
    """A policy, a credit alignment, or a run of an arm and seed for a table."""

    kind: str  # "policy", "credit", or a name of TABLES
    task: str
    arm: str = ""
    seed: int = 0

    def name(self) -> str:
        """Return the name of its record and its log."""
        return f"{self.kind}-{self.task}" + (f"-{self.arm}-{self.seed}" if self.arm else "")


def main() -> None:
    """Make the missing runs, and write and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--minutes", type=float, default=15.0, help="time of the whole call")
    parser.add_argument("--processes", type=int, default=2, help="processes at a time; 0 for this one alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=["credit", "curves"], metavar="TABLE[-TASK]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry-run", action="store_true", help="--size dry, one seed, in this process")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run:
        options.size, options.seeds, options.processes = "dry", [0], 0
    try:
        if options.job is not None:
            run_job(Job(*options.job), options, options.minutes)
            return
        (options.out / "logs").mkdir(parents=True, exist_ok=True)
        run_jobs(jobs_of(options), options)
        print("\n".join(write_tables(options.out)), flush=True)
    except TreepackError as error:
        raise SystemExit(f"error: {error}") from error


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return the jobs of the tables that are wanted, in the order in which they start."""
    tasks = [task for task in SIZES[options.size].policies if task != "sums"]
    pairs = [("credit", task) for task in tasks]
    pairs += [(name, task) for name in TABLES for task in (["sums"] if name == "sums" else tasks)]
    wanted = [pair for pair in pairs if f"{pair[0]}-{pair[1]}".startswith(tuple(options.only))]
    policies = [Job("policy", task) for task in dict.fromkeys(task for _, task in wanted)]
    alignments = [Job(*pair) for pair in wanted if pair[0] == "credit"]
    runs = [
        Job(name, task, arm, seed)
        for seed in options.seeds
        for name, task in wanted
        if name != "credit"
        for arm in TABLES[name].arms
    ]
    return [*policies, *alignments, *runs]


def is_done(job: Job, options: argparse.Namespace) -> bool:
    """Return True if the files of a job are complete, or enough."""
    if job.kind == "policy":
        return Path(options.out, job.name(), "warm_up.json").exists()
    if job.kind == "credit":
        return Path(options.out, "logs", f"{job.name()}.done").exists()
    return is_evaluated(options.out / f"{job.name()}.jsonl")


def run_job(job: Job, options: argparse.Namespace, minutes: float) -> None:
    """Run a job in this process."""
    size, policy, record = SIZES[options.size], options.out / f"policy-{job.task}", options.out / f"{job.name()}.jsonl"
    if job.kind == "policy":
        warm_up(policy, job.task, size.policies[job.task], device=options.device, minutes=minutes)
    elif job.kind == "credit":
        measure(policy, record, size.credit, device=options.device)
        (options.out / "logs" / f"{job.name()}.done").touch()
    else:
        sizes, tokens = size.steps.get(job.task, Sizes()), size.tokens[job.task]
        limits = {"seed": job.seed, "tokens": tokens, "minutes": minutes, "device": options.device}
        with record.open("w") as file:
            for line in train(policy, job.arm, ARMS[job.arm], sizes, **limits):
                file.write(json.dumps(line) + "\n")
                file.flush()


def run_jobs(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Run the jobs that are not done until the deadline; a job waits for the policy of its task."""
    deadline = time.monotonic() + 60 * options.minutes
    waiting = [job for job in jobs if not is_done(job, options)]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    while (waiting or running) and time.monotonic() < deadline:
        is_ready = {job.task: is_done(Job("policy", job.task), options) for job in waiting}
        ready = [job for job in waiting if job.kind == "policy" or is_ready[job.task]]
        if options.processes == 0:
            run_job(ready[0], options, (deadline - time.monotonic()) / 60)
            waiting.remove(ready[0])
            continue
        for job in ready[: options.processes - len(running)]:
            seconds = share_of(job, waiting, deadline, options.processes)
            waiting.remove(job)
            if seconds >= SHORTEST:
                running[job] = start(job, options, seconds / 60)
        for job, process in list(running.items()):
            if process.poll() is not None:
                print(f"{job.name()}: {'done' if process.returncode == 0 else 'failed; read its log'}", flush=True)
                del running[job]
        if not running and not ready:
            break  # a policy failed
        time.sleep(0.1)
    for process in running.values():
        process.terminate()
        process.wait()


def share_of(job: Job, waiting: Sequence[Job], deadline: float, processes: int) -> float:
    """Return the seconds of a job: the time that is left, divided among the runs that wait."""
    left = deadline - time.monotonic() - LAST
    if job.kind == "policy":
        return left / 4
    return left if job.kind == "credit" else min(left, left * processes / sum(bool(each.arm) for each in waiting))


def start(job: Job, options: argparse.Namespace, minutes: float) -> subprocess.Popen[bytes]:
    """Start a job as a process with a log."""
    words = [sys.executable, __file__, "--job", json.dumps([job.kind, job.task, job.arm, job.seed])]
    for name, value in {"out": options.out, "size": options.size, "device": options.device, "minutes": minutes}.items():
        words += [f"--{name}", str(value)]
    with (options.out / "logs" / f"{job.name()}.log").open("wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)


def write_tables(folder: Path) -> list[str]:
    """Write all tables of the records in `folder`, and return them with their names."""
    found = {path.stem: credit_table(path) for path in sorted(folder.glob("credit-*.jsonl"))}
    found |= {
        f"{name}-{task}": run_table(folder, name, task, table) for name, table in TABLES.items() for task in TASKS
    }
    texts = {name: text for name, text in found.items() if text is not None}
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text)
    return [f"## {name}\n\n{text}" for name, text in texts.items()]


if __name__ == "__main__":
    main()
