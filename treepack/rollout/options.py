"""Options of a tree sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.trajectory import Int32

BRANCHING = ("even", "likely", "unlikely")
FALLBACK = ("random", "none")


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The shape of a tree: Algorithm 1 of TreePO (arXiv 2508.17445), with independent sampling as a special case.

    Raises:
        TreepackError: a value that makes no sense, by its name.
    """

    width: int = 16  # leaves of a tree
    max_tokens: int = 7168  # maximum tokens of a path after the prompt, observations included
    segment: int | None = 512  # tokens of a segment; None continues to the end of the turn
    depth: int | None = 14  # maximum segments of a path; None for no limit
    # Continuations of the prompt: a number, the bounds of a number drawn for each query, or None for `width`, which
    # makes all leaves independent. Never more than `width`.
    first_forks: int | tuple[int, int] | None = 2
    branches: int = 2  # continuations of every later node, before the budget of finished paths is transferred
    # "even" divides the forks of a level evenly, "likely" and "unlikely" by a softmax over the mean log-probability of
    # the last segment, or over its negative.
    branching: str = "even"
    # Temperature of this softmax at the first and at the last level with forks, linear in between; without a `depth`
    # the first number only.
    branching_temperature: tuple[float, float] = (2.0, 2.0)
    # "random" returns to random segment boundaries of finished paths until `width` is reached; "none" does not.
    fallback: str = "random"
    max_repeats: int = 8  # repetitions of a run of tokens at the end of a path that end it; 0 never does
    # True for the token ids of a turn that contain an answer, which ends the path.
    is_answer: Callable[[Int32], bool] | None = None

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        for name, known in (("branching", BRANCHING), ("fallback", FALLBACK)):
            if getattr(self, name) not in known:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        for name in ("width", "max_tokens", "segment", "depth", "branches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TreepackError(f"{name} is {value}; expected at least 1")
        low, high = self.forks_of_prompt
        if not 1 <= low <= high:
            raise TreepackError(
                f"first_forks is {self.first_forks}; expected a number from 1 on, or bounds such as 2-8"
            )
        if self.max_repeats < 0:
            raise TreepackError(
                f"max_repeats is {self.max_repeats}; expected a number of repetitions, or 0 for no check"
            )
        if not all(math.isfinite(value) and value > 0 for value in self.branching_temperature):
            raise TreepackError(f"branching_temperature is {self.branching_temperature}; expected positive numbers")

    @property
    def forks_of_prompt(self) -> tuple[int, int]:
        """Smallest and largest number of continuations of a prompt."""
        if isinstance(self.first_forks, tuple):
            return self.first_forks
        return (self.width, self.width) if self.first_forks is None else (self.first_forks, self.first_forks)


def independent(*, width: int, max_tokens: int, depth: int | None = None, max_repeats: int = 0) -> TreeOptions:
    """Return the options of `width` independent rollouts. `depth` limits their turns."""
    return TreeOptions(
        width=width,
        max_tokens=max_tokens,
        segment=None,
        depth=depth,
        first_forks=None,
        branches=1,
        fallback="none",
        max_repeats=max_repeats,
    )
