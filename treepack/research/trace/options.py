"""Options of the simulation of a budget. This file imports no numerical library, because a page of help reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.option_fields import option

_MAX_COUNT = 10**6  # prompts, rollouts or steps: keeps time and memory within a laptop's


@dataclass(frozen=True, slots=True)
class BudgetExperiment:
    """A budget, and the simulated steps that spend it.

    Of `candidates` prompts, uniform allocation rolls out `selected` at random (None: half of them, or as many as can
    have two rollouts each). `budget` is M and `expand` is N. A prediction is the true chance of success, limited to
    0.01 .. 0.99, with normal noise on its log-odds. The noise has the standard deviation `root_noise` or
    `prefix_noise`, and each prompt and prefix has a separate draw.
    """

    candidates: int = option(512, "Prompts to choose from in a step.")
    budget: int = option(1024, "Rollouts of prompts in a step, M.")
    expand: int = option(2, "Continuations per rollout, N.")
    selected: int | None = option(None, "Prompts that uniform allocation uses; default: half of all.")
    root_noise: float = option(3.0, "Noise of the predicted values of prompts: standard deviation of their log-odds.")
    prefix_noise: float = option(1.5, "The same for predicted values of prefixes.")
    steps: int = option(100, "Simulated training steps.")
    seed: int = option(0, "Seed of all draws.")

    def __post_init__(self) -> None:
        """Check that the budget can be spent.

        Raises:
            TreepackError: a value outside its range, or a budget below two rollouts per selected prompt.
        """
        for name, minimum in (("candidates", 1), ("budget", 2), ("expand", 1), ("steps", 2), ("seed", 0)):
            if not minimum <= getattr(self, name) <= _MAX_COUNT:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected {minimum} .. {_MAX_COUNT:,}")
        for name in ("root_noise", "prefix_noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected 0 or a positive number")
        if not 1 <= self.num_selected <= self.candidates:
            raise TreepackError(f"selected is {self.selected}; expected 1 .. {self.candidates}, the candidates")
        if 2 * self.num_selected > self.budget:
            raise TreepackError(
                f"a budget of {self.budget} is too small for groups of two rollouts of {self.num_selected} selected "
                "prompts; raise it or select fewer"
            )

    @property
    def num_selected(self) -> int:
        if self.selected is not None:
            return self.selected
        # Half of the candidates, rounded up, but two rollouts for each: a single one cannot have both outcomes.
        return min(-(-self.candidates // 2), self.budget // 2)
