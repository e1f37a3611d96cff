"""Sample one tree from an engine: TreePO's Algorithm 1 as a coroutine per query.

    prompt --first forks--> paths --one segment each--> leaves, or paths again --forks--> ... --fallback--> width

All paths of one query advance together, because the forks of a level depend on how many paths are left. Queries do not
wait for each other. Every random choice comes from a generator of the query, and every request has a seed that depends
on the query and its place in the tree. So the requests are a function of the seed and of the answers, independent of
the order in which answers arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from treepack.rollout.branching import fallback_forks, level_forks
from treepack.rollout.endings import ending, limit
from treepack.rollout.engine import STOP, Engine, EngineError, Segment, check_segments, derived_seed
from treepack.rollout.episode import Episode
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.requests import all_or_none
from treepack.rollout.tree import ANSWER, NO_TOKENS, STOPPED, TokenUsage, Tree, TreeNode


async def sample_tree(query: Query, engine: Engine, options: TreeOptions, *, episode: Episode, seed: int = 0) -> Tree:
    """Sample the rollouts of `query`: `options.width` leaves, or `query.count` if it is given.

    Without a fallback the tree has fewer leaves if paths end before they have forked often enough. `episode` is the
    world after the prompt; it is closed at the end.

    Raises:
        TreepackError: the engine, the environment or the reward fails; nothing of the tree is returned then.
    """
    try:
        return await _grow(query, engine, options, episode, seed)
    finally:
        await episode.close()


async def _grow(query: Query, engine: Engine, options: TreeOptions, episode: Episode, seed: int) -> Tree:
    if query.count is not None:
        options = replace(options, width=query.count)
    growth = _GrowingTree(
        query, engine, options, seed, TreeNode(None, 0, 0, query.prompt, episode, turn=query.begun_turn)
    )
    rng = np.random.default_rng(derived_seed(seed, query.key, "choices"))
    low, high = options.forks_of_prompt
    first = min(int(rng.integers(low, high + 1)), options.width)
    active = await growth.extend({growth.root: first})
    level = 0
    while active or (len(growth.leaves) < options.width and options.fallback != "none"):
        if active:
            level += 1
            counts = level_forks(
                active, level=level, first=first, num_leaves=len(growth.leaves), options=options, rng=rng
            )
            active = await growth.extend(dict(zip(active, counts.tolist(), strict=True)))
        else:
            # A fallback fills the tree to its width, so its paths never fork again, whatever their level.
            forks = fallback_forks(growth.leaves, options=options, rng=rng)
            active = await growth.extend(forks, is_fallback=True)
    return Tree(query, growth.root, tuple(growth.leaves), growth.usage, engine.sampling)


@dataclass(slots=True)
class _GrowingTree:
    """A tree while it grows."""

    query: Query
    engine: Engine
    options: TreeOptions
    seed: int
    root: TreeNode
    leaves: list[TreeNode] = field(default_factory=list)
    usage: TokenUsage = field(default_factory=TokenUsage)
    num_nodes: int = 1

    async def extend(self, forks: dict[TreeNode, int], *, is_fallback: bool = False) -> list[TreeNode]:
        """Continue each node `forks` times, and return the new nodes whose paths continue, in order."""
        answers = await all_or_none(self._request(node, count) for node, count in forks.items())
        new: list[tuple[TreeNode, str]] = []
        # Nodes are numbered in the order of the forks, not of the answers, so that a tree is repeatable.
        for node, segments in zip(forks, answers, strict=True):
            for segment in segments:
                child = TreeNode(
                    parent=node,
                    number=self.num_nodes,
                    start=node.end,
                    tokens=segment.tokens,
                    episode=node.episode,
                    logprobs=segment.logprobs,
                    turn=np.concatenate([node.turn, segment.tokens]),
                    depth=node.depth + 1,
                    version=segment.version,
                    is_fallback=is_fallback,
                    routes=None if segment.routes is None else segment.routes[node.num_computed :],
                )
                self.num_nodes += 1
                node.children.append(child)
                new.append((child, segment.finish))
        await all_or_none(self._settle(node, finish) for node, finish in new)
        self.leaves += [node for node, _ in new if node.finish is not None]
        return [node for node, _ in new if node.finish is None]

    async def _request(self, node: TreeNode, count: int) -> list[Segment]:
        options, ids = self.options, node.ids()
        # Only the tokens that are left of the path, never a whole segment at its end.
        rest = options.max_tokens - (node.end - self.root.end)
        size = rest if options.segment is None else min(options.segment, rest)
        # A node that a fallback continues again needs another seed; the number of its children changes with each time.
        seed = derived_seed(self.seed, self.query.key, node.number, len(node.children))
        segments = await self.engine.extend(ids, count=count, max_tokens=size, seed=seed)
        check_segments(segments, count=count, max_tokens=size)
        for segment in segments:
            expected = len(ids) + len(segment.tokens) - 1
            if segment.routes is not None and len(segment.routes) != expected:
                raise EngineError(
                    f"the engine answered the experts of {len(segment.routes)} tokens; expected {expected}, all but "
                    "the last; check its version"
                )
        self.usage = self.usage.plus(len(ids), segments)
        return segments

    async def _settle(self, node: TreeNode, finish: str) -> None:
        """Let the environment answer a finished turn, and mark the node as a leaf if its path ends."""
        reason = ending(node, finish, num_prompt=self.root.end, options=self.options)
        # An answer ends the turn as a stop token does, so the environment sees it.
        if finish == STOP or reason == ANSWER:
            node.episode, observation = await node.episode.after(node.turn)
            node.turn = NO_TOKENS
            if observation is None:
                reason = reason or STOPPED
            else:
                node.observation = observation
                reason = reason or limit(node, num_prompt=self.root.end, options=self.options)
        if reason is not None:
            node.finish = reason
            node.reward = await node.episode.reward(node.turn)
