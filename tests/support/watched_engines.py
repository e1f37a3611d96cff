"""Engines around a simulated one that record, delay and fail, and laws without randomness.

WatchedEngine    records every request, and counts those under way, answered and cancelled
FailingEngine    fails at chosen requests, as a server under load does
ScriptedLaw      one fixed response
fingerprint      everything about a tree as values that compare equal
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treepack.rollout.engine import ABORT, Engine, Segment, TemporaryError
from treepack.rollout.options import Sampling
from treepack.rollout.tree import Tree
from treepack.trajectory import Float64, Int32


class ScriptedLaw:
    """The response is `response` and then `response[-1]` for ever; token 0 stops."""

    stop = 0

    def __init__(self, response: list[int], *, num_prompt: int = 1) -> None:
        self.response = response
        self.num_prompt = num_prompt

    def sample(self, ids: Int32, *, max_tokens: int, rng: np.random.Generator) -> tuple[Int32, Float64]:
        rest = self.response[len(ids) - self.num_prompt :]
        if 0 in rest:
            rest = rest[: rest.index(0) + 1]
        else:
            rest = rest + [self.response[-1]] * max_tokens
        tokens = np.array(rest[:max_tokens], np.int32)
        return tokens, np.zeros(len(tokens))


@dataclass(frozen=True)
class Request:
    ids: tuple[int, ...]
    count: int
    max_tokens: int
    seed: int


@dataclass
class WatchedEngine:
    """The engine, with random pauses before and after each answer if there is an `order`."""

    engine: Engine
    order: np.random.Generator | None = None
    requests: list[Request] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    answered: int = 0
    cancelled: int = 0

    @property
    def sampling(self) -> Sampling:
        return self.engine.sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        self.requests.append(Request(tuple(ids.tolist()), count, max_tokens, seed))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self._pause()
            segments = await self.engine.extend(ids, count=count, max_tokens=max_tokens, seed=seed)
            await self._pause()
            self.answered += 1
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # like an engine that tells its server
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1
        return segments

    async def _pause(self) -> None:
        if self.order is not None:
            await asyncio.sleep(self.order.random())

    async def publish(self, version: str) -> None:
        await self.engine.publish(version)

    async def close(self) -> None:
        await self.engine.close()


@dataclass
class FailingEngine:
    """The engine; attempt number n (from 0) of all fails as `failure(n)` says: "lost", "slow", "abort" or ""."""

    engine: Engine
    failure: Callable[[int], str]
    attempts: int = 0

    @property
    def sampling(self) -> Sampling:
        return self.engine.sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        failure = self.failure(self.attempts)
        self.attempts += 1
        if failure == "lost":
            raise TemporaryError("the connection was lost")
        if failure == "slow":
            await asyncio.sleep(1000)
        segments = await self.engine.extend(ids, count=count, max_tokens=max_tokens, seed=seed)
        if failure == "abort":
            segments[-1] = replace(segments[-1], tokens=segments[-1].tokens[:1], finish=ABORT)
        return segments

    async def publish(self, version: str) -> None:
        await self.engine.publish(version)

    async def close(self) -> None:
        await self.engine.close()


def fingerprint(tree: Tree) -> list[Any]:
    """Every value of every node, the order of the leaves, and the usage."""
    nodes = [
        (
            node.number,
            None if node.parent is None else node.parent.number,
            node.start,
            node.tokens.tolist(),
            None if node.logprobs is None else node.logprobs.tolist(),
            (node.depth, node.is_fallback, node.finish, node.reward, node.version),
        )
        for node in tree.nodes()
    ]
    return [tree.query.key, nodes, [leaf.number for leaf in tree.leaves], tree.usage]
