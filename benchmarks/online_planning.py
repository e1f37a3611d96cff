"""Time of planning a batch of rollouts in memory, from arrays to tensors, beside the planners of other trainers.

    python benchmarks/online_planning.py [--prompts 64] [--peer-prompts 16] [--capacity 16384] [--repeats 3]
                                         [--art prefix_tree_packing.py]

The samples are made here from a seed: 64 prompts with 8 rollouts of about 8,000 tokens in turns; 60 % of the rollouts
of a prompt branch off an earlier one at 20 to 90 % of its length. "rollouts" are whole ones; "turns" has a sample for
each turn, which contains all turns before it. Tokens of the model's turns are scored.

    treepack        `plan_batch` with the methods contiguous and auto: tensors, and the way back to the samples
    TRL             `TokenBudgetBatcher` and `TreeRow.pack` of trl's AsyncGRPO, with one rank, samples in order of their
                    prompts or shuffled; on --peer-prompts prompts, because it takes long
    ART             `prefix_tree_pack` of openpipe-art, one pack without a capacity. --art is the file of that name in
                    its wheel, which is loaded alone; nothing of it is copied.

Needs the development install; one thread. It prints one Markdown table, with seconds of the clock and of the processor
(the best of --repeats), and the time of the first call in a new process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.online import OnlineOptions, plan_batch
from treepack.trajectory import Int32

VOCABULARY = 150_000
TURNS = 8  # of a rollout, on average


@dataclass(frozen=True)
class Samples:
    """Token ids, which of them are scored, and the prompt of each sample."""

    tokens: list[Int32]
    scored: list[Any]
    prompt: list[int]

    @property
    def flat(self) -> int:
        return sum(map(len, self.tokens))

    def take(self, prompts: int) -> Samples:
        keep = [i for i, prompt in enumerate(self.prompt) if prompt < prompts]
        return Samples([self.tokens[i] for i in keep], [self.scored[i] for i in keep], [self.prompt[i] for i in keep])


def make_samples(prompts: int, *, turns: bool) -> Samples:
    """Return the rollouts of `prompts` prompts, or all their turns."""
    rng = np.random.default_rng(0)
    samples = Samples([], [], [])
    for prompt in range(prompts):
        text = rng.integers(0, VOCABULARY, 2400).astype(np.int32)
        group: list[tuple[Int32, list[int]]] = []
        for _ in range(8):
            base, ends = text, [len(text)]
            if group and rng.random() < 0.6:
                other, other_ends = group[rng.integers(len(group))]
                at = int(len(other) * rng.uniform(0.2, 0.9))
                base, ends = other[:at], [end for end in other_ends if end < at] or [len(text)]
                ends = [end for end in ends if end <= at] or [at]
            length = max(int(rng.normal(7800, 1200)), len(base) + 200)
            new = rng.integers(0, VOCABULARY, length - len(base)).astype(np.int32)
            # Turns of equal length after the turns that the rollout has in common with the earlier one.
            step = max((7800 - len(text)) // TURNS, 1)
            later = [*range(ends[-1] + step, length - step // 2, step), length]
            group.append((np.concatenate([base, new]), [*ends, *later]))
        for tokens, ends in group:
            _add(samples, tokens, ends, prompt, turns=turns)
    return samples


def _add(samples: Samples, tokens: Int32, ends: list[int], prompt: int, *, turns: bool) -> None:
    # The model writes the second part of each turn: of the tokens from one end to the next, 44 % are scored.
    scored = np.zeros(len(tokens), bool)
    for a, b in pairwise(ends):
        scored[b - int(0.44 * (b - a)) : b] = True
    if not turns:
        samples.tokens.append(tokens)
        samples.scored.append(scored)
        samples.prompt.append(prompt)
        return
    for a, b in pairwise(ends):
        mine = np.zeros(b, bool)
        mine[a:] = scored[a:b]
        samples.tokens.append(tokens[:b])
        samples.scored.append(mine)
        samples.prompt.append(prompt)


def best(function: Callable[[], int], repeats: int) -> tuple[int, float, float]:
    """Return the result of `function`, and the minimum of its seconds by the clock and on the processor."""
    results = []
    for _ in range(repeats):
        clock, processor = time.perf_counter(), time.process_time()
        tokens = function()
        results.append((time.perf_counter() - clock, time.process_time() - processor))
    return tokens, min(clock for clock, _ in results), min(processor for _, processor in results)


def trl_planner() -> Any:
    """Return TRL's planner; the first import of its trainer takes seconds."""
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    return TokenBudgetBatcher


def run_trl(samples: Samples, capacity: int, *, shuffled: bool) -> int:
    """Plan with TRL, and return the packed tokens."""
    order = np.random.default_rng(1).permutation(len(samples.tokens)) if shuffled else range(len(samples.tokens))
    source = [
        {
            "input_ids": torch.from_numpy(samples.tokens[i]),
            "completion_mask": torch.from_numpy(samples.scored[i].astype(np.int64)),
            "old_log_probs": torch.zeros(len(samples.tokens[i])),
            "advantage": 1.0,
            "group_id": samples.prompt[i],
        }
        for i in order
    ]
    budget = max(capacity, *map(len, samples.tokens))
    batcher: Iterator[Any] = iter(trl_planner()(source, 1, budget, {"batch/dropped_oversize_total": []}))
    return sum(len(row.pack()["input_ids"]) for rows in batcher for row in rows)


def load_art(path: Path) -> Any:
    """Return the module in `path`, without the package that it is part of."""
    spec = importlib.util.spec_from_file_location("prefix_tree_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def first_call(capacity: int) -> float:
    """Return the seconds of import and first call in a new process which has imported torch."""
    program = (
        "import time, numpy, torch\n"
        "batch = [numpy.arange(i, i + 2000) for i in range(64)]\n"
        "began = time.perf_counter()\n"
        "from treepack.online import OnlineOptions, plan_batch\n"
        f"plan_batch(batch, options=OnlineOptions(capacity={capacity}))\n"
        "print(time.perf_counter() - began)\n"
    )
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 64), ("peer-prompts", 16), ("capacity", 16384), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--art", type=Path, help="prefix_tree_packing.py of the wheel openpipe-art")
    values = parser.parse_args()
    torch.set_num_threads(1)
    print(f"first call in a process, after the import of torch: {first_call(values.capacity):.2f} s")
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n")
    trl_planner()
    print("| samples | flat tokens | planner | packed / tree tokens | s clock | s processor | M tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    art = load_art(values.art) if values.art else None
    for turns in (False, True):
        kind = "turns" if turns else "rollouts"
        everything = make_samples(values.prompts, turns=turns)
        for samples, peers in ((everything, False), (everything.take(values.peer_prompts), True)):
            batch = plan_batch(samples.tokens, None, samples.scored)
            planners: dict[str, tuple[Callable[[], int], int]] = {}
            for method in ("contiguous", "auto"):
                options = OnlineOptions(capacity=values.capacity, method=method)

                def plan(options: OnlineOptions = options, samples: Samples = samples) -> int:
                    return plan_batch(samples.tokens, None, samples.scored, options).num_tokens

                planners[f"treepack {method}"] = plan, values.repeats
            if peers:
                for order in ("in order", "shuffled"):

                    def plan_trl(shuffled: bool = order == "shuffled", samples: Samples = samples) -> int:
                        return run_trl(samples, values.capacity, shuffled=shuffled)

                    planners[f"TRL {order}"] = plan_trl, 1
            if peers and art is not None:
                tensors = [torch.from_numpy(each) for each in samples.tokens]

                def plan_art(tensors: list[torch.Tensor] = tensors) -> int:
                    return int(art.prefix_tree_pack(tensors, max_depth=1 << 20).tokens.numel())

                planners["ART, one pack"] = plan_art, 1
            for name, (function, repeats) in planners.items():
                tokens, clock, processor = best(function, repeats)
                ratio = tokens / batch.tokens_tree
                cells = [f"{kind}, {len(samples.tokens)}", f"{samples.flat / 1e6:.2f} M", name, f"{ratio:.3f}"]
                cells += [f"{each:.2f}" for each in (clock, processor, samples.flat / clock / 1e6)]
                print(f"| {' | '.join(cells)} |", flush=True)
        print(f"| {kind} | | tree tokens {batch.tokens_tree:,}, terms {len(batch.places):,} | | | | |")


if __name__ == "__main__":
    main()
