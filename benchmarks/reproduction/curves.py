"""Training curves: held-out pass rate over decoded tokens, for several arms and paired seeds.

    python benchmarks/reproduction/curves.py --policy FOLDER --out FOLDER [--arms grpo treepo] [--seeds 0 1 2 3 4]
        [--tokens 4e6] [--minutes 9] [--processes 10]
    python benchmarks/reproduction/curves.py --out FOLDER --report [--target 0.6]

    warm_up.py's folder --one process for each arm and seed--> FOLDER/TASK-ARM-SEED.jsonl --report--> curves-TASK.md
                                                                                                     curves-TASK.svg

The policy comes from warm_up.py. Every run starts from its weights. Runs of one seed have the same prompts in the same
order; all runs have the same held-out prompts, and the same random numbers in their evaluations. A run ends after
`--tokens` decoded tokens, or after `--minutes`. It appends a line after each step, so a run that is cut keeps what it
has, and the report compares the runs up to the smallest number of tokens that all have reached. Tokens of evaluations
do not count. A run that has been evaluated after its start is kept, and not started again.

Expected minutes on one H200 for ten runs side by side, for counts and not measured: 4e6 tokens are about 200 steps of
512 rollouts of 40 tokens, and 11 evaluations of 4,096 rollouts are 1.8e6 tokens more, so ten runs decode 58e6 tokens.
At 300,000 decoded tokens a second for all processes together that is 3.2 minutes; training and the samplers' Python on
16 cores about double it. The maze decodes one token for each turn and prefills its whole path each time, so its
rollouts have 10 to 15 decoded tokens: give it `--tokens 1e6`. `--minutes` bounds either.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import curves_arms
import numpy as np
import pros_arms
import torch
import trace_arms
from curves_arms import Arm, Sizes, State
from curves_tables import is_evaluated, write_report
from learner import evaluate, evaluation_queries, start_learner
from warm_up import load_task

from treepack.errors import TreepackError

ARMS: dict[str, Arm] = {
    "grpo": curves_arms.grpo,
    "grpo-narrow": curves_arms.grpo_narrow,
    "treepo": curves_arms.treepo,
    "treerpo": curves_arms.treerpo,
    "tree-grpo": curves_arms.tree_grpo,
    "tree-flat": curves_arms.tree_flat,
    **trace_arms.ARMS,
    **pros_arms.ARMS,
}
DRY_SIZES = Sizes(prompts=4, width=4, eval_prompts=4, eval_samples=2)
GRACE = 90  # seconds that a run has for its last step and evaluation after its time


def main() -> None:
    """Run one arm, run many side by side, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="folder that warm_up.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["grpo", "treepo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=float, default=4e6, help="decoded tokens of a run")
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations of a run after the first")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry-run", action="store_true", help="small steps and evaluations, for a CPU")
    parser.add_argument("--one", action="store_true", help="run the first arm and seed in this process")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--target", type=float, help="pass rate of the column with the tokens to a target")
    for each in dataclasses.fields(Sizes):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=int, help="by default that of Sizes")
    options = parser.parse_args()
    try:
        run(options)
    except TreepackError as error:
        raise SystemExit(f"error: {error}") from error


def run(options: argparse.Namespace) -> None:
    """Train the arms, or write the report, by the options of `main`."""
    if options.report:
        for text in write_report(options.out, target=options.target):
            print(text)
        return
    if options.policy is None:
        raise TreepackError("no --policy was given; write one with warm_up.py")
    task = load_task(options.policy).name
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        path = record_path(options.out, task, options.arms[0], options.seeds[0])
        if is_evaluated(path):
            raise TreepackError(f"{path}: exists; remove it, or give a new --out")
        with path.open("w") as file:
            for record in train(options):
                file.write(json.dumps(record) + "\n")
                file.flush()
        return
    pairs = [(arm, seed) for seed in options.seeds for arm in options.arms]
    known = [pair for pair in pairs if is_evaluated(record_path(options.out, task, *pair))]
    for arm, seed in known:
        print(f"{record_path(options.out, task, arm, seed)}: exists and is kept", flush=True)
    run_side_by_side(options, task, [pair for pair in pairs if pair not in known])


def record_path(folder: Path, task: str, arm: str, seed: int) -> Path:
    """Return the file of a run."""
    return folder / f"{task}-{arm}-{seed}.jsonl"


def train(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train one arm, and yield a record after each step; step 0 is the evaluation before the training."""
    begin = time.monotonic()
    sizes = sizes_of(options)
    arm, seed = options.arms[0], options.seeds[0]
    learner = start_learner(options.policy, device=options.device, rate=options.rate, rows=2048)
    held_out = evaluation_queries(learner.task, sizes.eval_prompts)
    state = State(learner, sizes, seed)
    names = {"task": learner.task.name, "arm": arm, "seed": seed}
    every, decoded, evaluated = options.tokens / options.evaluations, 0, 0
    rates = evaluate(learner, held_out, samples=sizes.eval_samples)
    yield names | {"step": 0, "decoded": 0, "pass_rate": float(np.mean(rates)), "sizes": dataclasses.asdict(sizes)}
    is_last = False
    while not is_last:
        started = time.monotonic()
        state.step += 1
        spent, figures = ARMS[arm](state)
        decoded += spent
        seconds = time.monotonic() - started
        is_last = decoded >= options.tokens or time.monotonic() - begin > 60 * options.minutes
        record = names | {"step": state.step, "decoded": decoded, "step_seconds": round(seconds, 4), **figures}
        # every 100, decoded 90, 130, 250: the evaluations are after the second and the third step.
        if is_last or decoded // every > evaluated:
            evaluated = int(decoded // every)
            record["pass_rate"] = float(np.mean(evaluate(learner, held_out, samples=sizes.eval_samples)))
        yield record


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes of the options, which have precedence over those of a dry run."""
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(Sizes)}
    chosen = DRY_SIZES if options.dry_run else Sizes()
    return dataclasses.replace(chosen, **{name: value for name, value in given.items() if value is not None})


def run_side_by_side(options: argparse.Namespace, task: str, pairs: list[tuple[str, int]]) -> None:
    """Start a process for each arm and seed, at most `options.processes` at a time, and wait for all.

    All of them end after `options.minutes`: a run that starts later has less time.

    Raises:
        TreepackError: a run failed; the others continue to their end first, and the logs of all are in the folder.
    """
    deadline = time.monotonic() + 60 * options.minutes
    waiting, running, failed = list(pairs), dict[tuple[str, int], subprocess.Popen[bytes]](), list[str]()
    while waiting or running:
        while waiting and len(running) < options.processes and time.monotonic() < deadline:
            pair = waiting.pop(0)
            minutes = (deadline - time.monotonic()) / 60
            with record_path(options.out, task, *pair).with_suffix(".log").open("wb") as log:
                command = child_command(options, *pair, minutes=minutes)
                running[pair] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        if not running:
            print(f"no time is left for {', '.join(f'{arm} {seed}' for arm, seed in waiting)}", flush=True)
            return
        for pair, process in list(running.items()):
            if process.poll() is None and time.monotonic() > deadline + GRACE:
                process.terminate()
                process.wait()
            if process.poll() is not None:
                print(f"{pair[0]} {pair[1]}: ended with {process.returncode}", flush=True)
                failed += [f"{pair[0]} {pair[1]}"] if process.returncode not in (0, -signal.SIGTERM) else []
                del running[pair]
        time.sleep(0.05)
    if failed:
        raise TreepackError(f"the runs {', '.join(failed)} failed; read their logs in {options.out}")


def child_command(options: argparse.Namespace, arm: str, seed: int, *, minutes: float) -> list[str]:
    """Return the command of one run."""
    words = [sys.executable, __file__, "--one", "--arms", arm, "--seeds", str(seed), "--minutes", f"{minutes:.3f}"]
    for name in ("policy", "out", "tokens", "evaluations", "rate", "device"):
        words += [f"--{name}", str(getattr(options, name))]
    for name, value in dataclasses.asdict(sizes_of(options)).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


if __name__ == "__main__":
    main()
