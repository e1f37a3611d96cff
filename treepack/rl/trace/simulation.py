"""What allocation is worth: simulated training steps, each budget spent uniformly and by TRACE.

    World, Experiment --simulate--> Arm, one for each way to spend the budget: measures by step

        stage 1, rollouts of prompts      uniform: as many of each of some random prompts    active: allocate_roots
        stage 2, continuations            uniform: at random turns of each rollout           active: allocate_prefixes

All arms spend M rollouts and M N continuations, M (1 + N / 2) rollouts in all: TRACE (arXiv 2606.11119), appendix E.5.
What it finds there is in its tables 1 and 2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.rl.trace.allocation import allocate_prefixes, allocate_roots
from treepack.rl.trace.worlds import Rollouts, World
from treepack.trajectory import Float64, Int64

CONFIDENT = 1.959964  # standard errors either side that hold 95 % of a normal distribution
MOST = 10**6  # of anything that is simulated
LIMITS = (0.01, 0.99)  # what a predictor can say


@dataclass(frozen=True, slots=True)
class Experiment:
    """A budget and the simulated steps that it is spent in.

    Of `candidates` prompts, uniform allocation rolls out `selected` at random (None: half of them, or as many as can
    have two rollouts each). `budget` is M and `expand` N. A prediction is the true chance of success, in 0.01 .. 0.99,
    with normal noise of standard deviation `noise` on its log-odds, drawn anew for each prompt and prefix.
    """

    candidates: int = 512
    budget: int = 1024
    expand: int = 2
    selected: int | None = None
    root_noise: float = 3.0
    prefix_noise: float = 1.5
    steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be spent."""
        for name, least in (("candidates", 1), ("budget", 2), ("expand", 1), ("steps", 2), ("seed", 0)):
            if not least <= getattr(self, name) <= MOST:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected {least} .. {MOST:,}")
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
        return min(-(-self.candidates // 2), self.budget // 2)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to spend the budget and what came of it, each measure float64 [steps].

    `root_ratio`: share of prompts rolled out with both outcomes, equation 21; `rollout_ratio`: share of rollouts below
    such prompts, equation 20; `prefix_ratio`: share of continued prefixes from where one ended differently;
    `mixed_prompts`: how many prompts had both; `cost`: rollouts, a continuation counted as the share of turns after its
    prefix.
    """

    active_roots: bool
    active_prefixes: bool
    root_ratio: Float64
    rollout_ratio: Float64
    prefix_ratio: Float64
    mixed_prompts: Float64
    cost: Float64


MEASURES = ("root_ratio", "rollout_ratio", "prefix_ratio", "mixed_prompts", "cost")
ARMS = tuple(itertools.product((False, True), repeat=2))


def simulate(world: World, experiment: Experiment) -> tuple[list[Arm], float | None]:
    """The four arms, uniform first, and the mean rank correlation of predicted with true chances of prompts, if any.

    The arms of a step share its prompts and predictions, and those of one stage 1 its rollouts, so that differences
    between arms vary less than they do.
    """
    found = np.empty((len(ARMS), len(MEASURES), experiment.steps))
    ranks = np.empty(experiment.steps)
    for step in range(experiment.steps):
        common, *stages = np.random.default_rng([experiment.seed, step]).spawn(1 + 2)
        prompt, value = world.draw_prompts(experiment.candidates, common)
        predicted = _predict(value, experiment.root_noise, common)
        ranks[step] = _rank_correlation(predicted, value)
        for active, random in zip((False, True), stages, strict=True):
            if active:
                count = allocate_roots(predicted, experiment.budget)
            else:
                count = _even(experiment, random)
            owner = np.repeat(np.arange(len(count)), count)
            bare = world.roll_out(prompt[owner], value[owner], random)
            for second in (False, True):
                found[ARMS.index((active, second)), :, step] = _expand(bare, owner, count, experiment, second, random)
    arms = [Arm(first, second, *measures) for (first, second), measures in zip(ARMS, found, strict=True)]
    known = ranks[np.isfinite(ranks)]
    return arms, float(known.mean()) if len(known) else None


def interval(values: Float64) -> tuple[float, float]:
    """Mean of `values` [steps] and half the width of its 95 % confidence interval, by the normal approximation."""
    return float(values.mean()), float(CONFIDENT * values.std(ddof=1) / math.sqrt(len(values)))


def _predict(value: Float64, noise: float, random: np.random.Generator) -> Float64:
    known = np.clip(value, *LIMITS)
    odds = np.log(known / (1 - known)) + noise * random.standard_normal(len(known))
    return 1 / (1 + np.exp(-odds))


def _rank_correlation(a: Float64, b: Float64) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(pl.DataFrame({"a": a, "b": b}).select(pl.corr("a", "b", method="spearman")).item())


def _even(experiment: Experiment, random: np.random.Generator) -> Int64:
    """The budget over prompts selected at random, the first of them one more where it does not divide."""
    count = np.zeros(experiment.candidates, np.int64)
    each, rest = divmod(experiment.budget, experiment.num_selected)
    chosen = random.permutation(experiment.candidates)[: experiment.num_selected]
    count[chosen] = each
    count[chosen[:rest]] += 1
    return count


def _expand(
    bare: Rollouts, owner: Int64, count: Int64, experiment: Experiment, active: bool, random: np.random.Generator
) -> list[float]:
    """Stage 2 below the `bare` rollouts of prompts `owner`, and the measures of its outcome.

    Continuations of what has no prefix become half as many rollouts of the prompt.
    """
    rollout = np.repeat(np.arange(len(owner)), bare.num_turns - 1)
    turn = np.arange(len(rollout)) - np.searchsorted(rollout, rollout) + 1
    value = bare.value[rollout, turn]
    prompts, expand = len(count), experiment.expand
    if active:
        predicted = _predict(value, experiment.prefix_noise, random)
        more = allocate_prefixes(predicted, bare.reward[rollout], owner[rollout], count * expand)
        again = np.where(np.bincount(owner[rollout], minlength=prompts) == 0, count * expand // 2, 0)
    else:
        more = _scattered(rollout, expand, random)
        again = np.bincount(owner[bare.num_turns == 1], minlength=prompts) * expand // 2
    of_prompt = np.zeros(prompts)
    of_prompt[owner] = bare.value[:, 0]

    ended = random.binomial(more, value)
    successes = np.bincount(owner, weights=bare.reward, minlength=prompts) + random.binomial(again, of_prompt)
    successes += np.bincount(owner[rollout], weights=ended, minlength=prompts)
    leaves = count + again + np.bincount(owner[rollout], weights=more, minlength=prompts)
    mixed: NDArray[np.bool_] = (successes > 0) & (successes < leaves)
    continued = more > 0
    flipped = np.where(bare.reward[rollout] > 0.5, ended < more, ended > 0)[continued]
    cost = len(owner) + again.sum() + (more * (1 - turn / bare.num_turns[rollout])).sum()
    return [
        mixed.sum() / (count > 0).sum(),
        leaves[mixed].sum() / leaves.sum(),
        flipped.mean() if len(flipped) else 0.0,
        mixed.sum(),
        cost,
    ]


def _scattered(rollout: Int64, expand: int, random: np.random.Generator) -> Int64:
    """`expand` continuations at random prefixes of each rollout, on different ones as far as there are as many."""
    order = np.lexsort((random.random(len(rollout)), rollout))
    rank = np.empty(len(rollout), np.int64)
    rank[order] = np.arange(len(rollout)) - np.searchsorted(rollout, rollout)
    size = np.bincount(rollout)[rollout] if len(rollout) else rank
    each: Int64 = expand // size + (rank < expand % size)
    return each
