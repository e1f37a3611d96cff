"""Comparison of allocations on simulated training steps: the same budget, spent uniformly and by TRACE.

    World, BudgetExperiment --simulate--> ExperimentArm, one for each way to spend the budget: measures by step

        stage 1, rollouts of prompts      uniform: equally many of each of some random prompts    active: allocate_roots
        stage 2, continuations            uniform: at random turns of each rollout             active: allocate_prefixes

All arms spend M rollouts and M N continuations, which count as M (1 + N / 2) rollouts in total: TRACE (arXiv
2606.11119), appendix E.5. The paper's own results are its tables 1 and 2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from treepack.research.trace.allocation import allocate_prefixes, allocate_roots
from treepack.research.trace.options import BudgetExperiment
from treepack.research.trace.worlds import SimulatedRollouts, World
from treepack.trajectory import Float64, Int64

_NORMAL_95_PERCENT = 1.959964  # standard errors on either side that include 95 % of a normal distribution
# Range of the true chances before noise is added: log-odds of 0 and 1 are infinite, and no noise would move them.
_PREDICTED_RANGE = (0.01, 0.99)


@dataclass(frozen=True, slots=True)
class ExperimentArm:
    """One way to spend the budget and its results, each measure float64 [steps].

    root_ratio      share of the prompts rolled out that had both outcomes, equation 21
    rollout_ratio   share of the rollouts that belong to such prompts, equation 20
    prefix_ratio    share of the continued prefixes with a continuation of the other outcome
    mixed_prompts   number of prompts that had both outcomes
    cost            number of rollouts; a continuation counts as the share of turns after its prefix
    """

    active_roots: bool
    active_prefixes: bool
    root_ratio: Float64
    rollout_ratio: Float64
    prefix_ratio: Float64
    mixed_prompts: Float64
    cost: Float64


# In the order in which `_expand` returns them.
MEASURES = ("root_ratio", "rollout_ratio", "prefix_ratio", "mixed_prompts", "cost")
# (active_roots, active_prefixes): uniform in both stages first.
ARMS = tuple(itertools.product((False, True), repeat=2))


def simulate(world: World, experiment: BudgetExperiment) -> tuple[list[ExperimentArm], float | None]:
    """Run the four arms. Return them, uniform first, and the mean rank correlation of predicted and true chances.

    The correlation is over prompts, and None if it is undefined in every step. The arms of a step share its prompts and
    predictions, and arms with the same stage 1 share its rollouts, so that differences between arms vary less than
    between independent runs.
    """
    # [arm, measure, step]
    measures = np.empty((len(ARMS), len(MEASURES), experiment.steps))
    ranks = np.empty(experiment.steps)
    for step in range(experiment.steps):
        # One stream for prompts and one for each kind of stage 1, so neither kind changes the draws of the other.
        common, *stages = np.random.default_rng([experiment.seed, step]).spawn(3)
        prompt, value = world.draw_prompts(experiment.candidates, common)
        predicted = _predict(value, experiment.root_noise, common)
        ranks[step] = _rank_correlation(predicted, value)
        for active, random in zip((False, True), stages, strict=True):
            if active:
                count = allocate_roots(predicted, experiment.budget)
            else:
                count = _spread_rollouts(experiment, random)
            # Prompt of each rollout: count [2, 0, 1] -> owner [0, 0, 2].
            owner = np.repeat(np.arange(len(count)), count)
            bare = world.roll_out(prompt[owner], value[owner], random)
            for second in (False, True):
                arm = ARMS.index((active, second))
                measures[arm, :, step] = _expand(bare, owner, count, experiment, second, random)
    arms = [ExperimentArm(first, second, *values) for (first, second), values in zip(ARMS, measures, strict=True)]
    known = ranks[np.isfinite(ranks)]
    return arms, float(known.mean()) if len(known) else None


def interval(values: Float64) -> tuple[float, float]:
    """Return the mean of `values` [steps] and half of its 95 % confidence interval, by the normal approximation."""
    return float(values.mean()), float(_NORMAL_95_PERCENT * values.std(ddof=1) / math.sqrt(len(values)))


def _predict(value: Float64, noise: float, random: np.random.Generator) -> Float64:
    # Noise on log-odds: a chance of 0.9 has log-odds of 2.2, and with noise of -3 it is predicted as 0.31.
    known = np.clip(value, *_PREDICTED_RANGE)
    odds = np.log(known / (1 - known)) + noise * random.standard_normal(len(known))
    return 1 / (1 + np.exp(-odds))


def _rank_correlation(a: Float64, b: Float64) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    # polars instead of scipy, which is an optional dependency.
    return float(pl.DataFrame({"a": a, "b": b}).select(pl.corr("a", "b", method="spearman")).item())


def _spread_rollouts(experiment: BudgetExperiment, random: np.random.Generator) -> Int64:
    """Divide the budget among prompts selected at random; the first of them get the remainder, one each."""
    # A budget of 7 for 3 of 4 prompts: each 2, rest 1 -> for example [2, 3, 2, 0].
    count = np.zeros(experiment.candidates, np.int64)
    each, rest = divmod(experiment.budget, experiment.num_selected)
    chosen = random.permutation(experiment.candidates)[: experiment.num_selected]
    count[chosen] = each
    count[chosen[:rest]] += 1
    return count


def _expand(
    bare: SimulatedRollouts,
    owner: Int64,
    count: Int64,
    experiment: BudgetExperiment,
    active: bool,
    random: np.random.Generator,
) -> list[float]:
    """Run stage 2 below the `bare` rollouts of prompts `owner`, and return its measures in the order of `MEASURES`.

    The continuations of a group or rollout without prefixes become half as many rollouts of the prompt.
    """
    # One entry per prefix: num_turns [3, 2] -> rollout [0, 0, 1], turn [1, 2, 1].
    rollout = np.repeat(np.arange(len(owner)), bare.num_turns - 1)
    turn = np.arange(len(rollout)) - np.searchsorted(rollout, rollout) + 1
    value = bare.value[rollout, turn]
    # more [num_prefixes]: continuations of each prefix. again [num_prompts]: further rollouts of prompts.
    prompts, expand = len(count), experiment.expand
    if active:
        predicted = _predict(value, experiment.prefix_noise, random)
        more = allocate_prefixes(predicted, bare.reward[rollout], owner[rollout], count * expand)
        again = np.where(np.bincount(owner[rollout], minlength=prompts) == 0, count * expand // 2, 0)
    else:
        more = _spread_continuations(rollout, expand, random)
        again = np.bincount(owner[bare.num_turns == 1], minlength=prompts) * expand // 2
    of_prompt = np.zeros(prompts)
    of_prompt[owner] = bare.value[:, 0]

    # ended [num_prefixes]: successes among the continuations of each prefix.
    ended = random.binomial(more, value)
    successes = np.bincount(owner, weights=bare.reward, minlength=prompts) + random.binomial(again, of_prompt)
    successes += np.bincount(owner[rollout], weights=ended, minlength=prompts)
    leaves = count + again + np.bincount(owner[rollout], weights=more, minlength=prompts)
    mixed: NDArray[np.bool_] = (successes > 0) & (successes < leaves)
    # A prefix flips if a continuation of a success fails, or a continuation of a failure succeeds.
    flipped = np.where(bare.reward[rollout] > 0.5, ended < more, ended > 0)[more > 0]
    cost = len(owner) + again.sum() + (more * (1 - turn / bare.num_turns[rollout])).sum()
    return [
        mixed.sum() / (count > 0).sum(),
        leaves[mixed].sum() / leaves.sum(),
        flipped.mean() if len(flipped) else 0.0,
        mixed.sum(),
        cost,
    ]


def _spread_continuations(rollout: Int64, expand: int, random: np.random.Generator) -> Int64:
    """Assign `expand` continuations to random prefixes of each rollout, as evenly as possible."""
    # rollout [0, 0, 0, 1], expand 2 -> for example [0, 1, 1, 2]. The rank is a random permutation within each rollout;
    # rollout is sorted, so the place of its first entry is the start of its ranks.
    order = np.lexsort((random.random(len(rollout)), rollout))
    rank = np.empty(len(rollout), np.int64)
    rank[order] = np.arange(len(rollout)) - np.searchsorted(rollout, rollout)
    size = np.bincount(rollout)[rollout] if len(rollout) else rank
    each: Int64 = expand // size + (rank < expand % size)
    return each
