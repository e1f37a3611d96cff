"""Trees from simulated engines, slow twins of their weights and laws, and estimates with standard errors.

grow, grow_tree    trees of one or several queries
split_evenly       the recursive definition of the leaf weights, without the code of treepack/rollout/tree.py
exact_values       mean length and probabilities of the last token of a cut-off MarkovLaw, step by step
estimate           mean and standard error over trees of one statistic of the leaves, under some weights
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from support.markov_law import MarkovLaw
from treepack.rollout.engine import Engine
from treepack.rollout.episode import Episode, SingleTurn
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import LengthLaw, log_normal_lengths
from treepack.rollout.tree import Tree, TreeNode, weights_of_leaves
from treepack.trajectory import Float64, Int32

PROMPT = np.array([1], np.int32)
START, LONG, SUCCESS = 1, 2, 3  # tokens of `two_speeds`


def query(key: str, prompt: Int32 = PROMPT, *, count: int | None = None) -> Query:
    return Query(key=key, group_id=key, prompt=prompt, count=count)


async def grow_tree(key: str, engine: Engine, options: TreeOptions, *, seed: int = 0) -> Tree:
    return await sample_tree(query(key), engine, options, episode=SingleTurn(), seed=seed)


def grow(
    engine: Engine, options: TreeOptions, num: int = 1, *, seed: int = 0, episode: Episode | None = None
) -> list[Tree]:
    """Sample the trees of the queries q0, q1, ..., one after the other."""

    async def all_trees() -> list[Tree]:
        return [
            await sample_tree(query(f"q{i}"), engine, options, episode=episode or SingleTurn(), seed=seed)
            for i in range(num)
        ]

    return asyncio.run(all_trees())


def split_evenly(node: TreeNode, weight: float = 1.0, *, fallback: bool = True) -> dict[TreeNode, float]:
    """Give `weight` to a leaf, or divide it among the children, without those of a fallback if `fallback` is False."""
    children = [child for child in node.children if fallback or not child.is_fallback]
    if not children:
        return {node: weight}
    return {
        leaf: share
        for child in children
        for leaf, share in split_evenly(child, weight / len(children), fallback=fallback).items()
    }


def two_speeds() -> MarkovLaw:
    """Rollouts end soon, or turn to the token LONG and take long; SUCCESS before the stop token 0 is a success."""
    return MarkovLaw(
        np.array([[0.0, 1.0, 0.0, 0.0], [0.1, 0.4, 0.2, 0.3], [0.06, 0.0, 0.94, 0.0], [0.6, 0.3, 0.1, 0.0]]), stop=0
    )


def exact_values(law: MarkovLaw, *, longest: int, first: int = START) -> tuple[float, float]:
    """Mean length after `first`, cut off at `longest` tokens, and the probability of SUCCESS and a stop in time."""
    state = np.eye(len(law.transition))[first]
    mean, success = 0.0, 0.0
    for _ in range(longest):
        mean += float(state.sum())  # the probability of one more token
        success += float(state[SUCCESS]) * law.transition[SUCCESS, law.stop]
        state = state @ law.transition
        state[law.stop] = 0.0
    return mean, success


def log_normal_law(*, mean: float = 40, longest: int = 160) -> tuple[LengthLaw, float]:
    """A law of log-normal lengths after one prompt token, and the exact mean of its lengths."""
    probability = log_normal_lengths(mean=mean, sigma=0.6, longest=longest)
    return LengthLaw(probability, num_prompt=len(PROMPT)), float(probability @ np.arange(longest + 1))


def length(leaf: TreeNode) -> float:
    """Number of tokens after the prompt."""
    return float(leaf.end - len(PROMPT))


def success(leaf: TreeNode) -> float:
    """1 if the path stops after SUCCESS, and 0 otherwise."""
    ids = leaf.ids()
    return float(ids[-1] == 0 and ids[-2] == SUCCESS)


@dataclass(frozen=True)
class Estimate:
    """A mean over trees and its standard error."""

    mean: float
    error: float

    def distance(self, truth: float) -> float:
        """Distance from `truth` in standard errors."""
        return abs(self.mean - truth) / self.error


def mean_and_error(values: Iterable[float]) -> Estimate:
    array = np.array(list(values))
    return Estimate(float(array.mean()), float(array.std(ddof=1) / np.sqrt(len(array))))


def plain(tree: Tree) -> Float64:
    """Equal weights, as in a mean over the leaves."""
    return np.full(len(tree.leaves), 1 / len(tree.leaves))


def weighted(tree: Tree) -> Float64:
    """All leaves with their weights."""
    return weights_of_leaves(tree)[0]


def before_fallback(tree: Tree) -> Float64:
    """The leaves from before the first fallback with their weights at that time."""
    return weights_of_leaves(tree)[1]


def estimate(trees: list[Tree], value: Callable[[TreeNode], float], weights: Callable[[Tree], Float64]) -> Estimate:
    return mean_and_error(float(np.array([value(leaf) for leaf in tree.leaves]) @ weights(tree)) for tree in trees)
