"""The warm-up of the SmolLM2 demonstration: supervised training by treepack's own commands on its own files.

    right solutions --> chats.jsonl --build-trie--> trie --pack--> rows --train--> checkpoints
    checkpoints, ascending --pass rate on held-out problems--> the first that solves the wanted share, else the last

The dial of the task is the number of steps: reinforcement learning needs problems that are solved now and then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from smollm2_sums import Sum, chat_record, problems

from treepack.errors import TreepackError
from treepack.train.saving.checkpoint_files import CHECKPOINTS, list_steps, step_of
from treepack.train.setup.initial_weights import find_weights

TREEPACK = (sys.executable, "-c", "import treepack_cli; treepack_cli.main()")


@dataclass(frozen=True)
class WarmUp:
    """Sizes of the warm-up.

    Attributes:
        samples: solved problems to train on.
        steps: optimiser steps, of one row each.
        every: steps between two checkpoints.
        capacity: tokens of a row.
        rate: learning rate, constant after `rising` steps.
        rising: steps in which the rate rises from 0.
        wanted: pass rate at which the warm-up ends.
    """

    samples: int = 24_000
    steps: int = 160
    every: int = 32
    capacity: int = 8192
    rate: float = 3e-4
    rising: int = 20
    wanted: float = 0.3


def train_checkpoints(
    model: Path, work: Path, size: WarmUp, *, held_out: Sequence[Sum], seed: int, device: str
) -> Path:
    """Run the commands in the folder `work`, and return the folder of the training run with its checkpoints.

    Raises:
        TreepackError: a command fails; it has printed its reason.
    """
    chats, trie, packed, run = (work / name for name in ("chats.jsonl", "trie", "packed", "warm_up"))
    with chats.open("w") as file:
        for problem in islice(problems(seed, without=frozenset(held_out)), size.samples):
            file.write(json.dumps(chat_record(problem, solved=True)) + "\n")
    command("build-trie", chats, "--out", trie, "--tokenizer", model, "--workers", 8, "--overwrite")
    command("pack", trie, "--out", packed, "--capacity", size.capacity, "--overwrite")
    sizes = {"steps": size.steps, "lr": size.rate, "warmup-steps": size.rising, "checkpoint-every": size.every}
    keep = -(-size.steps // size.every)
    options = {**sizes, "keep": keep, "min-lr-ratio": 1, "rows-per-step": 1, "seed": seed, "device": device}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command("train", packed, "--model", model, "--out", run, *words, "--overwrite")
    return run


def choose_checkpoint(
    policy: Any, model: Path, run: Path, *, wanted: float, measure: Callable[[], float]
) -> dict[int, float]:
    """Fill the policy with the first checkpoint that solves the wanted share, and return the pass rate of each one.

    Args:
        policy: a `LoadedModel`, which keeps the weights of the last checkpoint that was measured.
        model: the folder of the model before the training.
        run: the folder of the training run.
        wanted: pass rate that is enough.
        measure: returns the pass rate of the policy as it is.

    Raises:
        TreepackError: the run has no checkpoint.
    """
    rates: dict[int, float] = {}
    for path in reversed(list_steps(run / CHECKPOINTS)):
        with warnings.catch_warnings():  # this is one process
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            find_weights(str(path), model).fill(policy.model)
        rates[step_of(path)] = measure()
        if rates[step_of(path)] >= wanted:
            break
    if not rates:
        raise TreepackError(f"{run}: has no checkpoints; give the warm-up at least one step")
    return rates


def command(name: str, *arguments: object) -> None:
    """Run a command of treepack, whose output goes to the standard error.

    Raises:
        TreepackError: it fails.
    """
    words = [name, *map(str, arguments)]
    print("treepack", *words, file=sys.stderr, flush=True)
    if subprocess.run([*TREEPACK, *words], stdout=sys.stderr, check=False).returncode:
        raise TreepackError(f"treepack {name} failed; its message is above")
