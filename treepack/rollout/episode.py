"""The environment of a path: the tokens after a turn of the policy, and the reward of the whole path.

    Episode.after(turn) -> (next Episode, observation ids)      an environment answers, or the episode is over
    Episode.reward(unfinished) -> reward of the path

An episode is a value: `after` returns a new one and leaves the old one usable, because several paths continue it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from treepack.trajectory import Int32


class Episode(Protocol):
    """The state of the world after some turns of a path."""

    async def after(self, turn: Int32) -> tuple[Episode, Int32 | None]:
        """Return the state after the policy's `turn` (token ids with the stop token), and the observation's token ids.

        An observation of None means that the episode is over.

        Raises:
            TreepackError: the environment raised, or its observation contains no token ids.
        """
        ...

    async def reward(self, unfinished: Int32) -> float | None:
        """Return the reward of the path. `unfinished` are the ids of a last turn that was cut off, possibly empty.

        Raises:
            TreepackError: the reward function raised, or returned something else than a finite number or None.
        """
        ...

    async def close(self) -> None:
        """Release everything that the paths from this state hold open; no state is usable afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """The world of a prompt with one response; `score` returns the reward of the response ids."""

    score: Callable[[Int32], Awaitable[float | None]] | None = None
    response: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))

    async def after(self, turn: Int32) -> tuple[Episode, Int32 | None]:
        """The episode is over after the first turn."""
        return SingleTurn(self.score, turn), None

    async def reward(self, unfinished: Int32) -> float | None:
        """Return the score of the response, which may have been cut off."""
        if self.score is None:
            return None
        return await self.score(unfinished if len(unfinished) else self.response)

    async def close(self) -> None:
        """Nothing is open."""
