"""The three tasks as values with the same functions, and trees and pass rates sampled from them.

task = make_task("steps", error=0.2)
trees = sample_trees(task, task.queries(64, seed=1), engine, task.independent(8), seed=5)
pass_rates(trees)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import maze
import numpy as np
import steps
import sums
from words import STOP

from treepack.rollout.engine import Engine
from treepack.rollout.episode import Episode
from treepack.rollout.options import Sampling, TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.requests import run_queries
from treepack.rollout.sampler import sample_tree
from treepack.rollout.tree import Tree, weights_of_leaves
from treepack.trajectory import Float64, Int32

TASKS = ("steps", "maze", "sums")


@dataclass(frozen=True, slots=True)
class Task:
    """A task with a difficulty dial."""

    name: str  # one of TASKS
    dial: Any  # difficulty of all prompts besides their level
    sampling: Sampling  # temperature 1, and the tokens that end a turn
    max_tokens: int  # maximum number of tokens after the prompt, observations included
    tokens_of_segment: int | None  # between two forks of a tree; None for a task of turns, whose trees fork after them
    tree_share: float  # length of a leaf of TreePO's trees over an independent rollout, before the training
    queries: Callable[..., list[Query]]  # queries(num, seed=...): random prompts
    start: Callable[[Query], Awaitable[tuple[Int32, Episode]]]  # the prompt of a query and its episode
    examples: Callable[..., list[tuple[Int32, Int32]]]  # examples(num, seed=...): ids and masks of the warm-up

    @property
    def segment(self) -> str:
        """Segments of a rollout for credit: turns, or a number of tokens."""
        return "turn" if self.tokens_of_segment is None else str(self.tokens_of_segment)

    def independent(self, width: int) -> TreeOptions:
        """Return the options of `width` independent rollouts of each prompt."""
        return independent(width=width, max_tokens=self.max_tokens)

    def tree(self, width: int) -> TreeOptions:
        """Return the options of TreePO's trees: two branches at each segment until there are `width` paths."""
        segment = self.tokens_of_segment
        return TreeOptions(width=width, max_tokens=self.max_tokens, segment=segment, depth=None, max_repeats=0)


def make_task(name: str, *, levels: Sequence[int] | None = None, model: Path | None = None, **dial: float) -> Task:
    """Return a task.

    Args:
        name: one of `TASKS`.
        levels: levels of its prompts; None for all.
        model: the model's folder, whose tokenizer the task sums uses.
        dial: fields of the task's `Dial`; the others have their defaults.
    """
    module: Any = {"steps": steps, "maze": maze, "sums": sums}[name]
    more = {"dial": module.Dial(**dial), "levels": tuple(levels or module.LEVELS)}
    stop: tuple[int, ...]
    segment: int | None
    start: Callable[[Query], Awaitable[tuple[Int32, Episode]]]
    if name == "steps":
        stop, segment, tree_share, start = (STOP,), 6, 9 / 16, steps.start  # a line has 6 tokens
    elif name == "maze":
        stop, segment, tree_share, start = maze.STOP_TOKENS, None, 10 / 16, partial(maze.start, dial=more["dial"])
    else:
        from transformers import AutoTokenizer

        tokenizer = more["tokenizer"] = AutoTokenizer.from_pretrained(model)
        stop, segment, tree_share = (tokenizer.eos_token_id,), 8, 12 / 16
        start = partial(sums.start, tokenizer=tokenizer)
    return Task(
        name=name,
        dial=more["dial"],
        sampling=Sampling(stop_token_ids=stop),
        max_tokens=module.MAX_TOKENS,
        tokens_of_segment=segment,
        tree_share=tree_share,
        queries=partial(module.queries, **more),
        start=start,
        examples=partial(module.examples, **more),
    )


def sample_trees(
    task: Task, queries: Sequence[Query], engine: Engine, options: TreeOptions | Sequence[TreeOptions], *, seed: int
) -> list[Tree]:
    """Return a tree for each query, in order. All grow at the same time; call it outside of an event loop.

    `options` belong to all trees, or there is one for each query.
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


def rewards_of(tree: Tree) -> list[float]:
    """Return the reward of each leaf of a tree."""
    return [leaf.reward or 0.0 for leaf in tree.leaves]


def pass_rates(trees: Sequence[Tree]) -> Float64:
    """Return the mean reward of an independent rollout of each tree's query, float64 [num_trees], without bias."""
    return np.array([np.array(rewards_of(tree)) @ weights_of_leaves(tree)[1] for tree in trees])


def has_both_outcomes(trees: Sequence[Tree]) -> bool:
    """Return True if some rollouts of a group, which may have several trees, succeed and others fail."""
    return len({reward > 0 for tree in trees for reward in rewards_of(tree)}) == 2
