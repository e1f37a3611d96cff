"""Checks of rows in pieces whose carried tensors wait in host memory, on a GPU.

    CARRIED_CHECKS[name](name, device, quick=...)  ->  Result, ...      as the checks of `attention_checks`

    python benchmarks/carried_checks.py [--dry-run]      these checks alone

A tree runs through a small model in pieces, with everything on the GPU, and with some or all of it in host memory.
Losses and gradients must be equal in every bit, or, if torch's own sums differ from run to run, at most twice as far as
two plain runs. One case has a bound on rounding and a label with a mark: outputs that are computed again in
a compiled model, because torch.compile fuses the second computation in another way. Every copy starts late, and memory
that no kernel may read is NaN, as in `offload_checks`. Gradients of pieces are also compared with the whole row's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from attention_checks import Result
from carried_rows import random_forks, row_of_columns
from offload_checks import LAYERS, VOCABULARY, LateCopies, PoisonedPages, difference, gradients, small_model
from torch import Tensor

from treepack.carry.backward import CarryOptions, backward_row
from treepack.carry.offload import CarryBudget, CarryMemory, LayerShape
from treepack.carry.pieces import plan_row
from treepack.data.batch import Batch
from treepack.memory.host_pages import HostCopies
from treepack.model.layers import adapt_layers, set_recomputed
from treepack.model.loaded import LoadedModel

# Of each copy's delay, some 0.5 ms: a piece makes a copy for each layer, column and direction.
CYCLES = 1_000_000
# RMS of the difference over RMS of the gradient: bfloat16 rounds each product of a layer once in either way.
ROUNDING = 0.05
AGAIN = "outputs computed again"


def check_carried(name: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Compare losses and gradients of a row in pieces for several budgets; up to rounding as the header describes."""
    loaded, row, limit = small_model(device), _row(12 if quick else 1500), 16 if quick else 512
    compiled = name.endswith("compiled") and device.type == "cuda"
    adapt_layers(loaded.causal, checkpointing=True, compiled=compiled)
    lower = partial(torch.autocast, device.type, torch.bfloat16)
    ends, parent = row.subtree_end.numpy(), row.parent.numpy()
    plan = plan_row(ends, parent, limit)
    size = LayerShape(2, 64, 64, torch.bfloat16, device).num_bytes(plan.places, plan.carried)
    cases = {
        "all layers in host memory": CarryBudget(stack=0),
        "2 layers on the GPU": CarryBudget(stack=4 * size),
        "outputs in host memory": CarryBudget(outputs=0),
        AGAIN: CarryBudget(outputs=0, host_outputs=0),
        "everything in host memory": CarryBudget(stack=0, outputs=0),
    }

    def run(memory: CarryMemory | None) -> list[Tensor]:
        loaded.model.zero_grad(set_to_none=True)
        result = backward_row(loaded, row, CarryOptions(limit, memory=memory, autocast=lower))
        return [result.loss, *_grads(loaded)]

    for recomputed in (0, LAYERS):
        set_recomputed(loaded.causal, recomputed)
        expected, again = run(None), run(None)
        noise = difference(expected, again)
        for case, budget in cases.items():
            copies = LateCopies(device, CYCLES) if device.type == "cuda" else HostCopies()
            memory = CarryMemory(device, budget, pages=PoisonedPages(copies), copies=copies)
            memory.poisons = True
            rounds = compiled and case == AGAIN
            error = (_relative if rounds else difference)(run(memory), expected)
            free = float(memory.pages.num_free != memory.pages.count)
            label = f"{case}, {recomputed} layers recomputed{', up to rounding' if rounds else ''}"
            yield Result(name, label, loaded.attention, (error, free), (ROUNDING if rounds else 2 * noise, 0.0))
        error = _relative(expected, gradients(loaded, row))
        yield Result(name, f"the whole row, {recomputed} layers recomputed", loaded.attention, (error,), (ROUNDING,))


def _grads(loaded: LoadedModel) -> list[Tensor]:
    return [p.grad.clone() for p in loaded.model.parameters() if p.grad is not None]


def _relative(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the RMS of the difference of all gradients over their RMS; the loss, which comes first, is left out."""
    pairs = list(zip(results, expected, strict=True))
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs[1:])
    return float((off / sum(float(b.double().square().sum()) for _, b in pairs[1:])) ** 0.5)


def _row(length: int) -> Batch:
    work = random_forks("checks", 8, length)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, work.tokens)
    leaves = np.flatnonzero(work.subtree_end == np.arange(1, work.tokens + 1))
    return row_of_columns(0, ids, work.subtree_end, leaves, np.ones(work.tokens, bool))


CARRIED_CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    "carried rows": check_carried,
    "carried rows compiled": check_carried,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the checks, print a line for each, and exit 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="a small row on the CPU")
    options: Any = parser.parse_args(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    results = [each for name, check in CARRIED_CHECKS.items() for each in check(name, device, quick=options.dry_run)]
    for each in results:
        print(f"{'ok' if each.passed else 'WRONG'}  {each.check}: {each.case}: {each.errors} of at most {each.bounds}")
    sys.exit(0 if all(each.passed for each in results) else 1)


if __name__ == "__main__":
    main()
