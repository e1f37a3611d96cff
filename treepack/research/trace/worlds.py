"""Sources of simulated rollouts: a Markov model of success, or the recorded rollouts of a trie.

    world.draw_prompts(n) --> prompts int64 [n], their chances of success float64 [n]
    world.roll_out(prompts) --> SimulatedRollouts: turns, reward, and the chance of success after each turn

In both worlds, a continuation of a prefix succeeds with the prefix's chance of success. A simulation therefore needs
nothing else of a continuation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.research.trace.targets import anchors, binary_rewards
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie

_MIN_CHANCE = 1e-9  # distance of chances from 0 and 1, because the beta distribution needs positive parameters


@dataclass(frozen=True, slots=True)
class SimulatedRollouts:
    """Simulated rollouts: `num_turns` int64 and `reward` float64 [n], 0 or 1.

    `value` float64 [n, maximum number of turns] has the chance of success after turn t in column t, and the chance of
    the prompt in column 0. Columns from `num_turns` on have no meaning.
    """

    num_turns: Int64
    reward: Float64
    value: Float64


@dataclass(frozen=True, slots=True)
class MarkovWorld:
    """Prompts of beta-distributed difficulty, and rollouts whose chance of success is a martingale.

    A prompt's chance of success is drawn from a beta distribution with mean `success` and concentration `spread`. Below
    2, most prompts are easy or hard, as in TRACE (arXiv 2606.11119), figure 2a. A rollout has 2 .. `max_turns` turns.
    Every turn except the last replaces its chance v by a draw from Beta(p v, p (1 - v)) with p = `persistence`. This
    keeps the mean, as conditional chances must (proposition 2 of the paper). The larger p is, the less a turn decides.
    The last turn draws the outcome.
    """

    max_turns: int = 5
    success: float = 0.5
    spread: float = 0.5
    persistence: float = 4.0

    def __post_init__(self) -> None:
        """Check the parameters of the distributions.

        Raises:
            TreepackError: a value outside its range.
        """
        if self.max_turns < 2:
            raise TreepackError(f"max_turns is {self.max_turns}; expected 2 or more, else there is no prefix")
        if not 0 < self.success < 1:
            raise TreepackError(f"success is {self.success}; expected a mean chance between 0 and 1")
        # So that p v, a parameter of the beta distribution, is positive also at `_MIN_CHANCE`.
        for name in ("spread", "persistence"):
            if not 1e-6 <= getattr(self, name) < float("inf"):
                raise TreepackError(f"{name} is {getattr(self, name)}; expected a number of at least 1e-6")

    def draw_prompts(self, count: int, random: np.random.Generator) -> tuple[Int64, Float64]:
        """Draw new prompts and their chances of success; the prompts are only numbered."""
        # Mean a / (a + b) = success, concentration a + b = spread.
        a, b = self.spread * self.success, self.spread * (1 - self.success)
        return np.arange(count), random.beta(a, b, count)

    def roll_out(self, prompt: Int64, value: Float64, random: np.random.Generator) -> SimulatedRollouts:
        """Draw one rollout of each `prompt`; `value` are their chances of success."""
        # Column t [n] is drawn from column t - 1; all rollouts get max_turns columns, and later ones are ignored.
        values = np.empty((len(prompt), self.max_turns))
        values[:, 0] = value
        for turn in range(1, self.max_turns):
            before = np.clip(values[:, turn - 1], _MIN_CHANCE, 1 - _MIN_CHANCE)
            values[:, turn] = random.beta(self.persistence * before, self.persistence * (1 - before))
        turns = random.integers(2, self.max_turns + 1, len(prompt))
        reward = random.random(len(prompt)) < values[np.arange(len(prompt)), turns - 1]
        return SimulatedRollouts(turns, reward.astype(np.float64), values)


@dataclass(frozen=True, slots=True)
class _TrieWorld:
    """The recorded rollouts of a trie, drawn with replacement; see `recorded_world`.

    `members` int64 [num_trajectories] lists the rollouts by group; group g has members[start[g]:start[g + 1]].
    `rollouts` are sorted by trajectory. `value` float64 [num_groups] is each group's share of successes.
    """

    start: Int64
    members: Int64
    value: Float64
    rollouts: SimulatedRollouts

    def draw_prompts(self, count: int, random: np.random.Generator) -> tuple[Int64, Float64]:
        """Draw groups and their chances of success, with replacement only if there are fewer than `count`."""
        groups = len(self.value)
        prompt = random.choice(groups, count, replace=True) if count > groups else random.permutation(groups)[:count]
        return prompt, self.value[prompt]

    def roll_out(self, prompt: Int64, value: Float64, random: np.random.Generator) -> SimulatedRollouts:
        """Draw one recorded rollout of each group `prompt`, all with the same chance."""
        # start [0, 2, 4], prompt 1: index 2 + floor(u * 2) with u in [0, 1), so 2 or 3.
        sizes = np.diff(self.start)[prompt]
        member = self.members[self.start[prompt] + (random.random(len(prompt)) * sizes).astype(np.int64)]
        recorded = self.rollouts
        return SimulatedRollouts(recorded.num_turns[member], recorded.reward[member], recorded.value[member])


World = MarkovWorld | _TrieWorld


def recorded_world(trie: Trie, *, segment: str = "turn", persistence: float = 4.0) -> _TrieWorld:
    """Build a world that draws the rollouts of `trie`, with a chance of success after each of their turns.

    The chance of a prompt is its group's share of successes. If n rollouts pass through a prefix and s of them
    succeeded, its chance is (s + p v) / (n + p), with p = `persistence` and the chance v of the prefix one turn
    shorter. This adds p rollouts that succeed as often as the rollouts of the shorter prefix. With p = 0, a
    continuation is a recorded one. Below a prefix of a single rollout it then always has the outcome of that rollout,
    and there is nothing to discover.

    Raises:
        TreepackError: a negative `persistence`, a reward that is not 0 or 1, or any error of `segment_tree`.
    """
    if not 0 <= persistence < float("inf"):
        raise TreepackError(f"persistence is {persistence}; expected 0 or a positive number")
    reward = binary_rewards(trie)
    prefixes = anchors(trie, segment=segment)
    tree = prefixes.tree
    inner = tree.node < tree.num_inner
    passing = np.bincount(tree.node[inner], minlength=tree.num_inner)
    successes = np.bincount(tree.node[inner], weights=reward[tree.owner[inner]], minlength=tree.num_inner)
    value: Float64 = (successes / passing).astype(np.float64)
    # Top down, because a prefix uses the chance of its parent. A prefix of one success below 1/2, p = 4: 3/5 = 0.6.
    for low, high in zip(tree.level_start[1:-1].tolist(), tree.level_start[2:].tolist(), strict=True):
        above = value[tree.parent[low:high]]
        value[low:high] = (successes[low:high] + persistence * above) / (passing[low:high] + persistence)
    # Every turn but the last has a prefix.
    num_turns = np.bincount(prefixes.trajectory, minlength=trie.num_trajectories) + 1
    values = np.zeros((trie.num_trajectories, int(num_turns.max())))
    values[:, 0] = value[prefixes.group]
    values[prefixes.trajectory, prefixes.turn] = value[prefixes.node]
    # group [1, 0, 1] -> start [0, 1, 3], members [1, 0, 2]: group 0 has trajectory 1, group 1 has 0 and 2
    start = np.searchsorted(np.sort(prefixes.group), np.arange(tree.num_groups + 1))
    members = np.argsort(prefixes.group, kind="stable")
    return _TrieWorld(start, members, value[: tree.num_groups], SimulatedRollouts(num_turns, reward, values))
