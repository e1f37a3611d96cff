"""Bias and cost of tree sampling, with an engine whose mean length and pass rate are exact numbers.

    python benchmarks/sampling_bias.py [--queries 1200] [--seed 0] [--only 1500]

Trees of width 16 with two branches, in segments of 256, 512 or 1024 tokens, at most 7,168 in total. The lengths of
responses are log-normal (sigma 0.6), their tokens uniform, and the share of successes falls with the length. Every tree
is sampled with fallback. Without its fallback leaves it is the tree that the same seed gives with `fallback="none"`, so
each tree gives the figures of both.

The first table has means over queries of estimates from one tree, with standard errors; the second one the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import LengthLaw, SimulatedEngine, log_normal_lengths
from treepack.rollout.tree import Tree, TreeNode, weights_of_leaves
from treepack.trajectory import Float64, Int32

LONGEST = 7168
WIDTH = 16
PROMPT = np.arange(1, 201, dtype=np.int32)
VOCAB_SIZE = 32


@dataclass(frozen=True)
class Case:
    """A mean length and the shape of the tree."""

    mean: int
    segment: int
    first_forks: int | tuple[int, int] = 2

    @property
    def name(self) -> str:
        """Mean length, depth x segment length and first forks."""
        first = self.first_forks if isinstance(self.first_forks, int) else "-".join(map(str, self.first_forks))
        return f"{self.mean:,} | {LONGEST // self.segment} x {self.segment} | {first}"


CASES = [
    Case(mean, segment, first)
    for mean in (700, 1500, 3500)
    for segment, first in ((1024, 2), (512, 2), (512, (2, 8)), (256, 2))
]


def success_probability(length: Float64, mean: float) -> Float64:
    """Probability of a success: 0.5 at the mean length, and falling with the square of the length."""
    return 1 / (1 + (length / mean) ** 2)


def succeeds(response: Int32, mean: float) -> bool:
    """Draw the success of a response from its last tokens before the stop token, which are uniform."""
    digits = (response[-5:-1].astype(np.int64) - 1) @ (VOCAB_SIZE - 1) ** np.arange(4)
    probability = success_probability(np.array([len(response)], np.float64), mean)[0]
    return bool((digits + 0.5) / (VOCAB_SIZE - 1) ** 4 < probability)


@dataclass(frozen=True)
class Figures:
    """Figures of one tree; trees themselves would need gigabytes."""

    mean_length: tuple[float, ...]  # by each of ESTIMATORS
    pass_rate: tuple[float, ...]
    num_leaves: int
    num_leaves_before: int  # without the fallback
    decoded: int
    decoded_before: int
    leaf_tokens: float
    first_segments: int
    requests: int
    prefilled: int


def figures(tree: Tree) -> Figures:
    """Measure a tree."""
    before = list(without_fallback(tree))
    response = np.array([length(leaf) for leaf in tree.leaves])
    passed = np.array([reward(leaf) for leaf in tree.leaves])
    weights = [weights(tree) for weights in ESTIMATORS]
    return Figures(
        mean_length=tuple(float(response @ weight) for weight in weights),
        pass_rate=tuple(float(passed @ weight) for weight in weights),
        num_leaves=len(tree.leaves),
        num_leaves_before=sum(not node.children for node in before),
        decoded=tree.usage.decoded,
        decoded_before=sum(len(node.tokens) for node in before[1:]),
        leaf_tokens=float(response.sum()),
        first_segments=len(tree.root.children),
        requests=tree.usage.requests,
        prefilled=tree.usage.prefilled,
    )


def sampled(case: Case, *, num_queries: int, seed: int) -> list[Figures]:
    """Sample one tree for each query."""
    law = LengthLaw(lengths(case), num_prompt=len(PROMPT), vocab_size=VOCAB_SIZE)
    options = TreeOptions(
        width=WIDTH,
        max_tokens=LONGEST,
        segment=case.segment,
        depth=LONGEST // case.segment,
        first_forks=case.first_forks,
        max_repeats=0,
    )

    async def score(response: Int32) -> float:
        return float(succeeds(response, case.mean))

    async def all_trees() -> list[Figures]:
        engine = SimulatedEngine(law)
        queries = (Query(key=str(i), group_id=str(i), prompt=PROMPT) for i in range(num_queries))
        return [
            figures(await sample_tree(query, engine, options, episode=SingleTurn(score), seed=seed))
            for query in queries
        ]

    return asyncio.run(all_trees())


def lengths(case: Case) -> Float64:
    """Return the probability of every length."""
    return log_normal_lengths(mean=case.mean, sigma=0.6, longest=LONGEST)


def length(leaf: TreeNode) -> float:
    """Return the number of tokens after the prompt."""
    return float(leaf.end - len(PROMPT))


def reward(leaf: TreeNode) -> float:
    """Return 1 for a success and 0 otherwise."""
    assert leaf.reward is not None
    return leaf.reward


def equal(tree: Tree) -> Float64:
    """Weights of a plain mean over all leaves."""
    return np.full(len(tree.leaves), 1 / len(tree.leaves))


def equal_before(tree: Tree) -> Float64:
    """Weights of a plain mean over the leaves of the tree without fallback."""
    there = weights_of_leaves(tree)[1] > 0
    shares: Float64 = there / there.sum()
    return shares


def weighted(tree: Tree) -> Float64:
    """Leaf weights with the leaves of the fallback."""
    return weights_of_leaves(tree)[0]


def weighted_before(tree: Tree) -> Float64:
    """Leaf weights before the fallback."""
    return weights_of_leaves(tree)[1]


ESTIMATORS = (equal_before, weighted_before, equal, weighted)


def estimate_row(case: Case, trees: list[Figures], *, of_length: bool) -> str:
    """Truth, the four estimates with standard errors, and the effective number of rollouts of the weighted ones."""
    probability, number = lengths(case), np.arange(LONGEST + 1)
    passes = success_probability(number.astype(np.float64), case.mean)
    truth = float(probability @ (number if of_length else passes))
    variance = float(probability @ (number - truth) ** 2) if of_length else truth * (1 - truth)
    cells, effective = [], []
    for values in np.array([tree.mean_length if of_length else tree.pass_rate for tree in trees]).T:
        error = values.std(ddof=1) / np.sqrt(len(values))
        cells.append(f"{values.mean():,.0f} +- {error:.0f}" if of_length else f"{values.mean():.3f} +- {error:.3f}")
        effective.append(variance / values.var(ddof=1))
    shown = f"{truth:,.0f}" if of_length else f"{truth:.3f}"
    return f"| {case.name} | {shown} | {' | '.join(cells)} | {effective[1]:.1f}, {effective[3]:.1f} |"


def without_fallback(tree: Tree) -> Iterable[TreeNode]:
    """Yield the nodes that are in the tree without its fallback."""
    waiting = [tree.root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in node.children if not child.is_fallback]


def cost_row(case: Case, trees: list[Figures]) -> str:
    """Tokens decoded, requests and prefill, without and with fallback."""
    truth = float(lengths(case) @ np.arange(LONGEST + 1))
    num_before = sum(tree.num_leaves_before for tree in trees)
    num_leaves = sum(tree.num_leaves for tree in trees)
    return (
        f"| {case.name} | {truth:,.0f} | {saved(sum(tree.decoded_before for tree in trees) / num_before, truth)} "
        f"| {saved(sum(tree.decoded for tree in trees) / num_leaves, truth)} | {num_before / len(trees):.1f} "
        f"| {1 - num_before / num_leaves:.0%} | {np.mean([tree.first_segments for tree in trees]):.1f} "
        f"| {sum(tree.requests for tree in trees) / num_leaves:.1f} "
        f"| {sum(tree.prefilled for tree in trees) / sum(tree.leaf_tokens for tree in trees):.1f} |"
    )


def saved(per_leaf: float, truth: float) -> str:
    """Tokens decoded per leaf, and their change against independent sampling."""
    return f"{per_leaf:,.0f} ({per_leaf / truth - 1:+.0%})"


SHAPE = "| mean | depth x segment | first forks |"
ESTIMATES = "plain | weighted | plain, fallback | weighted, fallback | effective rollouts"
COSTS = (
    "independent | decoded per leaf | with fallback | leaves | fallback leaves | first segments | requests per leaf "
    "| prefill per leaf token"
)


def print_table(title: str, columns: str, rows: list[str]) -> None:
    """Print a table in Markdown."""
    header = f"{SHAPE} {columns} |"
    print(f"\n{title}\n\n{header}\n|{'---|' * (header.count('|') - 1)}", *rows, sep="\n", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="mean length of the cases to run")
    options = parser.parse_args(arguments)
    mean_rows, pass_rows, cost_rows = [], [], []
    for case in (case for case in CASES if options.only in (None, case.mean)):
        print(case.name, file=sys.stderr, flush=True)
        trees = sampled(case, num_queries=options.queries, seed=options.seed)
        mean_rows.append(estimate_row(case, trees, of_length=True))
        pass_rows.append(estimate_row(case, trees, of_length=False))
        cost_rows.append(cost_row(case, trees))
    print_table("Mean length", f"exact | {ESTIMATES}", mean_rows)
    print_table("Pass rate", f"exact | {ESTIMATES}", pass_rows)
    print_table("Tokens", COSTS, cost_rows)


if __name__ == "__main__":
    main()
