"""Waiting of ranks for each other: rows with even score pairs against rows that are even in the time of a model.

    python benchmarks/balance.py TRIE ... [--capacity 16384] [--ranks 4] [--models qwen3-8b,qwen3.5-4b]

For each trie and model, prints the time of all rounds over the time if no rank waited: by score pairs, and by the cost
of the model (`pack --balance R --model MODEL`). Longer trajectories are left out. No row is written.
"""

from __future__ import annotations

import argparse

from treepack.costs.model_cost import pairs_of_token, read_shape
from treepack.pack.capacity import fit_capacity
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.planning import plan_rows
from treepack.pack.totals import totals_of_rows
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie


def wait(trie: Trie, capacity: int, ranks: int, *, token_pairs: int, model: int) -> float:
    """Return the waiting of rows made even with `token_pairs`, in the time of a model with `model` pairs per token."""
    plan = plan_rows(trie, capacity=capacity, method="contiguous", multiple_of=ranks, token_pairs=token_pairs)
    totals = totals_of_rows(
        check_plan(trie, plan),
        capacity=capacity,
        multiple_of=ranks,
        lower_bound=trie.tokens_tree,
        tokens_flat=trie.tokens_flat,
        token_pairs=model,
    )
    return float(totals["group_cost_max_over_mean"])


def main() -> None:
    """Print one line per trie and model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tries", nargs="+", metavar="TRIE")
    parser.add_argument("--capacity", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--models", default="qwen3-8b,qwen3.5-4b")
    arguments = parser.parse_args()
    print("| trie | model | even pairs | even time |\n|---|---|---|---|")
    for path in arguments.tries:
        trie, _ = fit_capacity(read_trie(path), arguments.capacity, too_long="drop")
        for name in arguments.models.split(","):
            model = pairs_of_token(read_shape(name))
            waits = [wait(trie, arguments.capacity, arguments.ranks, token_pairs=n, model=model) for n in (0, model)]
            print(f"| {path} | {name} | {waits[0]:.3f} | {waits[1]:.3f} |")


if __name__ == "__main__":
    main()
