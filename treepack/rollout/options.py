"""Options of rollouts: the shape of trees, the distribution, the limits of a run.

This file imports no numerical library, because the command line reads its options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treepack.errors import TreepackError
from treepack.option_fields import check_options, option

if TYPE_CHECKING:
    from treepack.trajectory import Int32

BRANCHING = ("even", "likely", "unlikely")
FALLBACK = ("random", "none")


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The shape of a tree: Algorithm 1 of TreePO (arXiv 2508.17445), with independent sampling as a special case.

    Raises:
        TreepackError: a value that makes no sense, by its name.
    """

    width: int = option(16, "Rollouts of each query, if PROMPTS has no numbers of rollouts.", minimum=1)
    max_tokens: int = option(7168, "Maximum tokens of a rollout after its prompt, observations included.", minimum=1)
    # None continues to the end of the turn.
    segment: int | None = option(512, "Tokens of a segment, or whole turns.", minimum=1)
    depth: int | None = option(14, "Maximum segments of a rollout; without trees, maximum turns.", minimum=1)
    # A number, its bounds, or None for `width`, which makes all leaves independent. Never more than `width`.
    first_forks: int | tuple[int, int] | None = option(
        2, "Continuations of the prompt; with bounds, a number drawn for each query."
    )
    branches: int = option(
        2, "Continuations of each later path, to which the forks of ended paths are added.", minimum=1
    )
    # By a softmax over the mean log-probability of the last segment, or over its negative.
    branching: str = option(
        "even",
        "Divide the forks of a level evenly, or more of them to paths of likely or of unlikely segments.",
        choices=BRANCHING,
    )
    # Linear between the first and the last level with forks; without a `depth` the first number only.
    branching_temperature: tuple[float, float] = option(
        (2.0, 2.0), "Temperature of this division; with bounds, at the first and the last level."
    )
    fallback: str = option("random", "random: return to random segments until --width is reached.", choices=FALLBACK)
    max_repeats: int = option(8, "Repetitions of the same tokens that end a rollout; 0 for no check.")
    is_answer: Callable[[Int32], bool] | None = None  # True for the ids of a turn with an answer, which ends the path

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        check_options(self)
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


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the distribution that an engine samples from; one for a whole run.

    `temperature` must be positive. `top_p` and `top_k` cut the distribution off; 1 and 0 leave it whole.
    `stop_token_ids` end a continuation; the stop token is its last token.

    Raises:
        TreepackError: a value that makes no sense, by its name.
    """

    temperature: float = option(1.0, "Temperature of the sampling.")
    top_p: float = option(1.0, "Share of probability that is kept; 1 for all.")
    top_k: int = option(0, "Tokens kept; 0 for all.")
    stop_token_ids: tuple[int, ...] = option(
        (), "Token that ends a turn; may be repeated. Default: the ends of sequence of the model."
    )

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the field."""
        if not 0 < self.temperature <= 100:
            raise TreepackError(f"temperature is {self.temperature}; expected a positive number of at most 100")
        if not 0 < self.top_p <= 1:
            raise TreepackError(f"top_p is {self.top_p}; expected a share above 0 and at most 1, where 1 keeps all")
        if self.top_k < 0:
            raise TreepackError(f"top_k is {self.top_k}; expected a number of tokens, where 0 keeps all")
        if any(token < 0 for token in self.stop_token_ids):
            raise TreepackError(f"stop_token_ids are {list(self.stop_token_ids)}; expected token ids, which are >= 0")


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """Options of a run besides the shape of its trees.

    Raises:
        TreepackError: a value that makes no sense, by its name.
    """

    seed: int = option(0, "Seed of all choices.", minimum=0, maximum=2**63 - 1)
    concurrency: int = option(64, "Maximum requests to the engine at a time.", minimum=1)
    max_queries: int = option(32, "Maximum queries in work at a time.", minimum=1)
    timeout: float = option(600.0, "Seconds that an attempt of a request may take.")
    attempts: int = option(5, "Attempts of a request that fails for now.", minimum=1)
    resume: bool = option(False, "Continue an existing --out: its finished trees are not sampled again.")
    # Names and JSON values of everything else on which the samples depend, such as the engine's model and the reward
    # function. A run is resumed only with the same ones.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        check_options(self)
        if not self.timeout > 0:
            raise TreepackError(f"timeout is {self.timeout}; expected a positive number of seconds")
