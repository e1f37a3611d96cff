"""Train a policy from scratch on traces of a task, until it solves a wanted share of the prompts.

    python benchmarks/reproduction/warm_up.py --task steps --out FOLDER [--wanted 0.28] [--shape small] [--device cuda]
                                              [--seed 0] [--max-steps 4000] [--minutes 30] [--batch 256]
                                              [--workers 0] [--set error=0.18 ...]

The folder gets the policy, and warm_up.json with the dial, the training steps, and the pass rate of each level. The
pass rates are printed as a table. Every `--every` steps the policy answers new prompts, and the training stops when the
mean over the levels is the wanted one or more, or after `--minutes`. `--workers` processes make the traces.

A policy that imitates the traces perfectly solves 0.30 of the chains, as `error` of their dial says.

On a CPU, one or two minutes of one core each:
    --task steps --shape tiny --rate 3e-3 --batch 32 --levels 2 3 4 5 6 --set modulus=11
    --task maze --shape tiny --rate 3e-3 --batch 32 --levels 5
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decode import DecodeEngine
from policy import SHAPES, make_policy, save_policy
from tasks import TASKS, Task, level_rates, make_task
from torch import Tensor

from treepack.errors import TreepackError
from treepack.trajectory import Int32

EVALUATION_SEED = 1_000_003  # prompts that no arm trains
SAMPLES_AT_ONCE = 64  # batches whose traces are made together


def main() -> None:
    """Train, save, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wanted", type=float, default=0.28)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=30.0, help="maximum time of the training")
    parser.add_argument("--workers", type=int, default=0, help="processes that make traces; 0 for this one")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--levels", type=int, nargs="*", help="levels to train; all by default")
    parser.add_argument("--prompts", type=int, default=512, help="prompts of an evaluation")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="fields of the task's dial")
    options = parser.parse_args()
    try:
        run(options)
    except TreepackError as error:
        raise SystemExit(f"error: {error}") from error


def run(options: argparse.Namespace) -> None:
    """Train and save; see `main`."""
    if options.out.exists():
        raise TreepackError(f"{options.out}: exists; give a new folder")
    task = make_task(options.task, levels=options.levels, **parse_dial(options.set))
    model = make_policy(options.shape, seed=options.seed).to(options.device)
    begin = time.monotonic()
    engine = DecodeEngine(model, task.sampling, rows=2048 if options.device != "cpu" else 512)
    rates: dict[int, float] = {}
    steps = 0
    for steps in train(model, task, options):
        is_last = steps == options.max_steps or time.monotonic() - begin > 60 * options.minutes
        if steps % options.every and not is_last:
            continue
        rates = level_rates(task, engine, num=options.prompts, width=4, seed=EVALUATION_SEED)
        mean = float(np.mean(list(rates.values())))
        print(f"step {steps}: pass rate {mean:.3f}, {time.monotonic() - begin:.0f} s", flush=True)
        if mean >= options.wanted or is_last:
            break
    save_policy(model, options.out)
    record = {
        "task": task.name,
        "dial": {name: getattr(task.dial, name) for name in task.dial.__slots__},
        "levels": task.levels,
        "shape": options.shape,
        "seed": options.seed,
        "steps": steps,
        "batch": options.batch,
        "seconds": round(time.monotonic() - begin, 1),
        "pass_rates": rates,
    }
    (options.out / "warm_up.json").write_text(json.dumps(record, indent=2) + "\n")
    print(table(rates))


def parse_dial(settings: list[str]) -> dict[str, float]:
    """Return the fields of a dial from words such as "error=0.2".

    Raises:
        TreepackError: a word of another form.
    """
    dial: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            dial[name] = int(value) if value.isdigit() else float(value)
        except ValueError as error:
            raise TreepackError(f"--set {setting}: expected a name and a number, such as error=0.2") from error
    return dial


def load_task(folder: Path) -> Task:
    """Return the task of a policy that `run` saved, with its dial.

    Raises:
        TreepackError: the folder has no warm_up.json.
    """
    path = folder / "warm_up.json"
    if not path.exists():
        raise TreepackError(f"{path}: there is no such file; write the policy with warm_up.py")
    record = json.loads(path.read_text())
    return make_task(record["task"], levels=record["levels"], **record["dial"])


def train(model: Any, task: Task, options: argparse.Namespace) -> Iterator[int]:
    """Train on new traces, and yield the number of steps after each one."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step, (ids, mask) in enumerate(batches(task, options.batch, options.seed, options.workers), 1):
        # Linear to the full rate in 100 steps, and then constant: the pass rate decides when the training stops.
        optimiser.param_groups[0]["lr"] = options.rate * min(1.0, step / 100)
        # bfloat16 products on a GPU; the weights and the loss stay float32.
        kind = torch.device(options.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
            value = trace_loss(model, ids.to(options.device), mask.to(options.device))
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        yield step
        if step == options.max_steps:
            return


def trace_loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the trained tokens. `ids` and `mask` are [B, N], padded at the end."""
    # No token sees padding, because it comes after it.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(ids[:, 1:])
    return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


def batches(task: Task, size: int, seed: int, workers: int = 0) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield batches of `size` new traces without end: ids and mask, int64 [size, N] each.

    `workers` processes make them in advance; the traces are the same for any number.
    """
    for number, samples in enumerate(_traces(task, size * SAMPLES_AT_ONCE, seed, workers)):
        order = np.random.default_rng([seed, number]).permutation(len(samples)).reshape(-1, size)
        for chosen in order:
            yield padded([samples[index] for index in chosen])


def _traces(task: Task, num: int, seed: int, workers: int) -> Iterator[list[tuple[Int32, Int32]]]:
    seeds = range(seed, 1 << 62, 7919)
    if workers == 0:
        yield from (task.examples(num, seed=each) for each in seeds)
        return
    # Not forked, because a forked process cannot use a GPU that its parent uses.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as executor:
        waiting = deque(executor.submit(task.examples, num, seed=seeds[number]) for number in range(workers))
        for each in seeds[workers:]:
            yield waiting.popleft().result()
            waiting.append(executor.submit(task.examples, num, seed=each))


def padded(samples: list[tuple[Int32, Int32]]) -> tuple[Tensor, Tensor]:
    """Return ids and masks of samples as tensors, int64 [B, N], filled up with zeros."""
    width = max(len(ids) for ids, _ in samples)
    both = np.zeros((2, len(samples), width), np.int64)
    for row, sample in enumerate(samples):
        for part, values in zip(both, sample, strict=True):
            part[row, : len(values)] = values
    return torch.from_numpy(both[0]), torch.from_numpy(both[1])


def table(rates: dict[int, float]) -> str:
    """Return the pass rate of each level as a Markdown table."""
    lines = ["| level | pass rate |", "|---|---|"]
    lines += [f"| {level} | {rate:.3f} |" for level, rate in rates.items()]
    return "\n".join([*lines, f"| mean | {np.mean(list(rates.values())):.3f} |"])


if __name__ == "__main__":
    main()
