"""The two tasks as values with the same functions, and trees and pass rates sampled from them.

task = make_task("steps", error=0.2)
engine = DecodeEngine(policy, task.sampling)
trees = sample_trees(task, task.queries(64, seed=1), engine, task.independent(8), seed=5)
tree_rewards(trees[0]), weights_of_leaves(trees[0])[1]
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import maze
import numpy as np
import steps
from words import STOP

from treepack.errors import TreepackError
from treepack.rollout.engine import Engine, Sampling
from treepack.rollout.episode import Episode
from treepack.rollout.options import TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.requests import run_queries
from treepack.rollout.sampler import sample_tree
from treepack.rollout.tree import Tree, weights_of_leaves
from treepack.trajectory import Float64, Int32

TASKS = ("steps", "maze")


@dataclass(frozen=True, slots=True)
class Task:
    """A task with a difficulty dial.

    Attributes:
        name: "steps" or "maze".
        dial: difficulty of all prompts besides their level.
        levels: levels of its prompts.
        sampling: temperature 1, and the tokens that end a turn.
        max_tokens: maximum number of tokens after the prompt, observations included.
        max_turns: maximum number of turns of the policy.
        queries: `queries(num, seed=..., levels=...)` returns random prompts whose field `level` is the level.
        start: returns the prompt of a query and its episode, as `sample_rollouts` calls it.
        examples: `examples(num, seed=..., levels=...)` returns samples of the warm-up: token ids, and 1 for each token
            to train.
    """

    name: str
    dial: Any
    levels: Sequence[int]
    sampling: Sampling
    max_tokens: int
    max_turns: int
    queries: Callable[..., list[Query]]
    start: Callable[[Query], Awaitable[tuple[Int32, Episode]]]
    examples: Callable[..., list[tuple[Int32, Int32]]]

    def independent(self, width: int) -> TreeOptions:
        """Return the options of `width` independent rollouts of each prompt."""
        return independent(width=width, max_tokens=self.max_tokens)


def make_task(name: str, *, levels: Sequence[int] | None = None, **dial: float) -> Task:
    """Return a task.

    Args:
        name: "steps" or "maze".
        levels: levels of its prompts; None for all.
        dial: fields of `steps.Dial` or `maze.Dial`; the others have their defaults.

    Raises:
        TreepackError: there is no such task, level or field.
    """
    if name not in TASKS:
        raise TreepackError(f"task is {name!r}; expected one of {', '.join(TASKS)}")
    module: Any = {"steps": steps, "maze": maze}[name]
    known = [each.name for each in fields(module.Dial)]
    for unknown in dial.keys() - known:
        raise TreepackError(f"the dial of {name} has no {unknown}; it has {', '.join(known)}")
    chosen = tuple(module.LEVELS if levels is None else levels)
    if not chosen or not set(chosen) <= set(module.LEVELS):
        raise TreepackError(f"levels are {list(chosen)}; expected some of {list(module.LEVELS)}")
    setting = module.Dial(**dial)
    return Task(
        name=name,
        dial=setting,
        levels=chosen,
        sampling=Sampling(stop_token_ids=(STOP,) if name == "steps" else maze.STOP_TOKENS),
        max_tokens=module.MAX_TOKENS,
        max_turns=1 if name == "steps" else maze.MAX_TURNS,
        queries=partial(module.queries, dial=setting, levels=chosen),
        start=steps.start if name == "steps" else partial(maze.start, dial=setting),
        examples=partial(module.examples, dial=setting, levels=chosen),
    )


def sample_trees(
    task: Task, queries: Sequence[Query], engine: Engine, options: TreeOptions | Sequence[TreeOptions], *, seed: int
) -> list[Tree]:
    """Return a tree for each query, in order. All grow at the same time; call it outside of an event loop.

    `options` are those of all trees, or one for each query.
    """
    shapes = [options] * len(queries) if isinstance(options, TreeOptions) else options

    async def grow(number: int, query: Query) -> tuple[int, Tree]:
        prompt, episode = await task.start(query)
        query = replace(query, prompt=prompt)
        return number, await sample_tree(query, engine, shapes[number], episode=episode, seed=seed)

    async def grow_all() -> list[Tree]:
        coroutines = (partial(grow, number, query) for number, query in enumerate(queries))
        async with contextlib.aclosing(run_queries(coroutines, max_queries=max(1, len(queries)))) as done:
            trees = dict([each async for each in done])
        return [trees[number] for number in range(len(queries))]

    return asyncio.run(grow_all())


def tree_rewards(tree: Tree) -> Float64:
    """Return the reward of each leaf of a tree, float64 [num_leaves]."""
    return np.array([leaf.reward for leaf in tree.leaves], np.float64)


def pass_rates(trees: Sequence[Tree]) -> Float64:
    """Return the mean reward of an independent rollout of each tree's query, float64 [num_trees], without bias."""
    return np.array([tree_rewards(tree) @ weights_of_leaves(tree)[1] for tree in trees])


def level_rates(task: Task, engine: Engine, *, num: int, width: int, seed: int) -> dict[int, float]:
    """Return the pass rate of each level by `width` independent rollouts of about `num` prompts in total."""
    queries = task.queries(num, seed=seed)
    rates = pass_rates(sample_trees(task, queries, engine, task.independent(width), seed=seed))
    levels = np.array([query.fields["level"] for query in queries])
    return {level: float(rates[levels == level].mean()) for level in np.unique(levels).tolist()}
