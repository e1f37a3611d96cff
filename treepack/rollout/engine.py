"""The one seam between samplers and engines: continue a list of token ids `count` times by at most `max_tokens` tokens.

    Engine.extend([7, 1, 2], count=2, max_tokens=3, seed=5)  ->  Segment([4, 9, 9], "length"), Segment([4, 0], "stop")

Everything above this seam (forks, depths, weights, environments) is the samplers'; everything below it (prefix caches,
batches, processes) is the engine's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.rollout.options import Sampling
from treepack.trajectory import Float32, Int32

STOP, LENGTH, ABORT = "stop", "length", "abort"


class EngineError(TreepackError):
    """An answer of the engine that cannot be used; asking again would not help."""


class TemporaryError(EngineError):
    """A failure of the engine that may be over at the next attempt: a lost connection, an overloaded server."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One continuation.

    `tokens` int32 [n] includes the stop token. `logprobs` float32 [n] are log-probabilities in nats at the temperature
    of the sampling, or None. `finish` is "stop" (a stop token), "length" (`max_tokens` reached) or "abort" (the engine
    gave up). `version` names the policy that sampled it, "" if the engine cannot name it. `num_cached` is the number of
    request tokens whose keys came from the engine's cache, None if unknown. `routes` [m, layers, k] are the experts
    that a mixture's routers chose for the m tokens of request and continuation but the last one, None if unknown.
    """

    tokens: Int32
    logprobs: Float32 | None
    finish: str
    version: str = ""
    num_cached: int | None = None
    routes: NDArray[np.integer[Any]] | None = None


class Engine(Protocol):
    """Continues token ids. Calls may run at the same time, and a cancelled call leaves no trace."""

    @property
    def sampling(self) -> Sampling:
        """The distribution that every call samples from."""
        ...

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Continue `ids` int32 [n] `count` times, by 1 to `max_tokens` tokens each.

        `seed`, in [0, 2**62), makes the answer repeatable if the engine supports it.

        Raises:
            TemporaryError: another attempt may succeed.
            EngineError: it will not.
        """
        ...

    async def publish(self, version: str) -> None:
        """Announce that the weights have changed: later segments have this version, and no old keys are reused."""
        ...

    async def close(self) -> None:
        """Release connections, threads and memory; calls still under way fail."""
        ...


def check_segments(segments: list[Segment], *, count: int, max_tokens: int) -> None:
    """Check that an engine's answer fits its request.

    Raises:
        EngineError: too few or too many continuations, an empty or too long one, or log-probabilities that do not fit.
    """
    if len(segments) != count:
        raise EngineError(f"the engine answered {len(segments)} continuations; expected {count}, as requested")
    for segment in segments:
        if not 1 <= len(segment.tokens) <= max_tokens:
            raise EngineError(
                f"the engine continued a prompt by {len(segment.tokens)} tokens; expected 1 to {max_tokens}"
            )
        if segment.finish not in (STOP, LENGTH):
            raise EngineError(f"the engine ended a continuation with {segment.finish[:60]!r}; expected stop or length")
        if segment.finish == LENGTH and len(segment.tokens) < max_tokens:
            raise EngineError(
                f"the engine stopped after {len(segment.tokens)} of {max_tokens} tokens without a stop token; "
                "give it room for longer sequences, or lower --max-tokens"
            )
        logprobs = segment.logprobs
        if logprobs is not None and (len(logprobs) != len(segment.tokens) or not np.isfinite(logprobs).all()):
            raise EngineError("the engine's log-probabilities are not one finite number per token; check its version")


def derived_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**62) that depends on all `parts` and on nothing else."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
