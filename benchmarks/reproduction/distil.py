"""On-policy distillation of a small policy from a better one: KL and pass rate before and after, by each loss.

    python benchmarks/reproduction/distil.py --out distil --steps 40       two policies of `steps`, then each loss

The teacher imitates traces without errors, the student traces in which 0.18 of the lines are wrong. Each step samples
independent rollouts of new prompts from the student, scores their trees by the teacher, and takes one update. The KL is
the mean of KL(student || teacher) over the tokens of rollouts of held-out prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner import CAPACITY, Learner, start_learner, trajectories_of
from policies import WarmUp, evaluate, held_out_queries, warm_up
from tasks import sample_trees

import treepack
from treepack.model.forward import WholeRows
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.objectives.row_numbers import LossPart
from treepack.rollout.tree import Tree
from treepack.train.teacher import add_teacher

TEACHER = "teacher"  # any name: the model is passed beside the objective
LOSSES: dict[str, Objective] = {
    "sampled token": choose_objective("opd", teacher=TEACHER),
    "sampled token, baseline": choose_objective("opd", teacher=TEACHER, teacher_baseline=True),
    "forward KL": choose_objective("distill", teacher=TEACHER, distill_beta=0.0),
    "Jensen-Shannon, 0.5": choose_objective("distill", teacher=TEACHER, distill_beta=0.5),
    "reverse KL": choose_objective("distill", teacher=TEACHER),
}
REVERSE = LOSSES["reverse KL"]
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"shape": "tiny", "rate": 3e-3, "batch": 32, "levels": (2, 3, 4, 5, 6)},
    "test": {"shape": "test", "batch": 8, "every": 2, "max_steps": 2, "prompts": 4, "levels": (2,)},
}


def run_rows(learner: Learner, teacher: Any, trees: Sequence[Tree], objective: Objective, *, train: bool) -> float:
    """Return the mean divergence of rollouts from the teacher, and add gradients if `train` is set."""
    trie = treepack.build_trie(trajectories_of(trees))
    rows = list(treepack.plan_packing(trie, treepack.PackOptions(capacity=CAPACITY["cpu"], effort="low")))
    total = weight = 0.0
    for row, factors in zip(rows, row_factors(rows, objective), strict=True):
        batch = add_teacher(treepack.make_batch(row), teacher, objective, chunk=1024)
        runner, part = WholeRows(learner.policy), LossPart(objective, factors)
        with torch.set_grad_enabled(train):
            sums = (runner.backward if train else runner.loss)(batch, part).sums
        total, weight = total + float(sums.get("divergence", 0.0)), weight + float(sums["weight"])
    return total / weight


def distil(student: Path, teacher: Any, objective: Objective, options: argparse.Namespace) -> list[float]:
    """Train a student; return its KL and pass rate on held-out prompts before and after, and the seconds of a step."""
    learner = start_learner(student, device="cpu", rate=options.rate)
    task, shape = learner.task, learner.task.independent(8)
    held_out = held_out_queries(task, options.held_out)

    def figures() -> list[float]:
        trees = sample_trees(task, held_out, learner.engine, task.independent(4), seed=11)
        divergence = run_rows(learner, teacher, trees, REVERSE, train=False)
        return [divergence, float(np.mean(evaluate(task, learner.engine, held_out, samples=4)))]

    before, begin = figures(), time.monotonic()
    for step in range(1, options.steps + 1):
        trees = sample_trees(task, task.queries(options.prompts, seed=step), learner.engine, shape, seed=step)
        run_rows(learner, teacher, trees, objective, train=True)
        torch.nn.utils.clip_grad_norm_(learner.policy.model.parameters(), 1.0)
        learner.optimiser.step()
        learner.optimiser.zero_grad(set_to_none=True)
        asyncio.run(learner.engine.publish(str(step)))
    seconds = (time.monotonic() - begin) / max(options.steps, 1)
    return [*before, *figures(), seconds]


def main() -> None:
    """Make both policies if they are missing, distil by each loss, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps of each loss")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, with 8 rollouts each")
    parser.add_argument("--held-out", type=int, default=128, help="held-out prompts, with 4 rollouts each")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--minutes", type=float, default=5, help="maximum of a policy's warm-up")
    parser.add_argument("--dry-run", action="store_true", help="policies that learn nothing, for tests")
    options = parser.parse_args()
    shape = SHAPES["test" if options.dry_run else "tiny"]
    policies = {}
    for name, wanted, error in (("teacher", 0.95, 0.0), ("student", 0.4, 0.18)):
        policies[name] = options.out / name
        if not policies[name].exists():
            setting = WarmUp(wanted=wanted, dial={"modulus": 11, "error": error}, **shape)
            warm_up(policies[name], "steps", setting, device="cpu", minutes=options.minutes)
    teacher = treepack.load_model(policies["teacher"])
    lines = ["| loss | KL before | KL after | pass rate before | after | s / step |", "|---|---|---|---|---|---|"]
    for name, objective in LOSSES.items():
        kl, rate, kl_after, rate_after, seconds = distil(policies["student"], teacher, objective, options)
        lines.append(f"| {name} | {kl:.3f} | {kl_after:.3f} | {rate:.3f} | {rate_after:.3f} | {seconds:.2f} |")
        print(lines[-1], flush=True)
    (options.out / "distil.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
