"""An engine of a known law: the length of a response has any distribution, and its tokens are uniform.

LengthLaw --SimulatedEngine--> segments      fast for long responses; another law may take its place
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np

from treepack.rollout.engine import LENGTH, STOP, Segment
from treepack.rollout.options import Sampling
from treepack.trajectory import Float64, Int32


class ContinuationLaw(Protocol):
    """A distribution of continuations."""

    stop: int

    def sample(self, ids: Int32, *, max_tokens: int, rng: np.random.Generator) -> tuple[Int32, Float64]:
        """Return the tokens of one continuation and their log-probabilities, [n] each; a stop token is the last."""
        ...


class LengthLaw:
    """A response after a prompt of `num_prompt` tokens has n tokens with probability `probability[n]`, n >= 1.

    All tokens but the last are uniform among 1 .. vocab_size - 1; the last one is the stop token 0.
    """

    stop = 0

    def __init__(self, probability: Float64, *, num_prompt: int, vocab_size: int = 32) -> None:
        assert probability[0] == 0
        assert abs(probability.sum() - 1) < 1e-9
        self.num_prompt = num_prompt
        self.vocab_size = vocab_size
        self._cumulative = probability.cumsum()
        # survival[n] is the probability of more than n tokens, hazard[n] that of exactly n among n or more.
        before = np.concatenate([[1.0], np.maximum(1 - self._cumulative[:-1], 1e-300)])
        self._hazard = np.clip(probability / before, 0.0, 1.0)

    def sample(self, ids: Int32, *, max_tokens: int, rng: np.random.Generator) -> tuple[Int32, Float64]:
        """Draw the length among those longer than the response so far."""
        begin = len(ids) - self.num_prompt
        below = self._cumulative[begin]
        length = int(np.searchsorted(self._cumulative, below + rng.random() * (1 - below), side="right"))
        length = min(max(length, begin + 1), len(self._cumulative) - 1)
        size = min(length - begin, max_tokens)
        tokens = rng.integers(1, self.vocab_size, size).astype(np.int32)
        # Each token first decides whether it is the last, then which one it is.
        hazard = self._hazard[begin + 1 : begin + size + 1]
        logprobs = np.log(np.maximum(1 - hazard, 1e-300)) - np.log(self.vocab_size - 1)
        if begin + size == length:
            tokens[-1] = self.stop
            logprobs[-1] = np.log(hazard[-1])
        return tokens, logprobs


def log_normal_lengths(*, mean: float, sigma: float, longest: int) -> Float64:
    """Return probabilities of the lengths 0 .. `longest`: log-normal with this `mean`, longer ones moved to the end."""
    mu = np.log(mean) - sigma**2 / 2
    edges = (np.log(np.arange(1, longest)) - mu) / (sigma * np.sqrt(2))
    # P(length <= n) for n = 1 .. longest - 1; everything above is `longest`.
    cumulative = 0.5 * (1 + np.array([math.erf(edge) for edge in edges.tolist()]))
    return np.diff(np.concatenate([[0.0], cumulative, [1.0]]), prepend=0.0)


class SimulatedEngine:
    """An engine that samples from a `law`; `pause` is awaited before each answer, to change the order of answers."""

    def __init__(
        self, law: ContinuationLaw, *, version: str = "", pause: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.law = law
        self.version = version
        self.pause = pause

    @property
    def sampling(self) -> Sampling:
        """Temperature 1, and the stop token of the law."""
        return Sampling(stop_token_ids=(self.law.stop,))

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Sample from the law; the answer is a function of the arguments."""
        await (asyncio.sleep(0) if self.pause is None else self.pause())
        segments = []
        for number in range(count):
            rng = np.random.default_rng([seed, number])
            tokens, logprobs = self.law.sample(ids, max_tokens=max_tokens, rng=rng)
            finish = STOP if tokens[-1] == self.law.stop else LENGTH
            segments.append(Segment(tokens, logprobs.astype(np.float32), finish, self.version))
        return segments

    async def publish(self, version: str) -> None:
        """Name the policy of the segments to come."""
        self.version = version

    async def close(self) -> None:
        """Nothing is open."""
