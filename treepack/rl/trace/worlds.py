"""Where simulated rollouts come from: a Markov model of success, or the recorded rollouts of a trie.

    world.draw_prompts(n) --> prompts int64 [n], their chances of success float64 [n]
    world.roll_out(prompts) --> Rollouts: turns, reward, and the chance of success after each turn

In both a continuation of a prefix succeeds with the chance of success there, so no more than that needs be known of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.rl.trace.targets import anchors, binary_rewards
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie

EDGE = 1e-9  # chances nearer to 0 or 1 than this count as settled: the beta distribution needs positive parameters


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Simulated rollouts: `num_turns` int64 and `reward` float64 [n], 0 or 1.

    `value` float64 [n, most turns]: the chance of success after turn t in column t, that of the prompt in column 0;
    columns from `num_turns` on mean nothing.
    """

    num_turns: Int64
    reward: Float64
    value: Float64


@dataclass(frozen=True, slots=True)
class MarkovWorld:
    """Prompts of beta-distributed difficulty, and rollouts whose chance of success is a martingale.

    A prompt's chance of success is drawn from a beta distribution of mean `success` and concentration `spread`: below 2
    most prompts are easy or hard, as in TRACE (arXiv 2606.11119), figure 2a. A rollout has 2 .. `max_turns` turns. Each
    but the last moves its chance v to a draw from Beta(p v, p (1 - v)), p = `persistence`, which keeps the mean, as
    conditional chances must (its proposition 2): the larger p, the less a turn decides. The last one draws the outcome.
    """

    max_turns: int = 5
    success: float = 0.5
    spread: float = 0.5
    persistence: float = 4.0

    def __post_init__(self) -> None:
        """Refuse values that make no distribution."""
        if self.max_turns < 2:
            raise TreepackError(f"max_turns is {self.max_turns}; expected 2 or more, else there is no prefix")
        if not 0 < self.success < 1:
            raise TreepackError(f"success is {self.success}; expected a mean chance between 0 and 1")
        for name in ("spread", "persistence"):
            if not 1e-6 <= getattr(self, name) < float("inf"):
                raise TreepackError(f"{name} is {getattr(self, name)}; expected a number of at least 1e-6")

    def draw_prompts(self, count: int, random: np.random.Generator) -> tuple[Int64, Float64]:
        """New prompts every time, so their numbers mean nothing; and their chances of success."""
        a, b = self.spread * self.success, self.spread * (1 - self.success)
        return np.arange(count), random.beta(a, b, count)

    def roll_out(self, prompt: Int64, value: Float64, random: np.random.Generator) -> Rollouts:
        """One rollout of each `prompt`, whose chances of success are `value`."""
        values = np.empty((len(prompt), self.max_turns))
        values[:, 0] = value
        for turn in range(1, self.max_turns):
            before = np.clip(values[:, turn - 1], EDGE, 1 - EDGE)
            values[:, turn] = random.beta(self.persistence * before, self.persistence * (1 - before))
        turns = random.integers(2, self.max_turns + 1, len(prompt))
        reward = random.random(len(prompt)) < values[np.arange(len(prompt)), turns - 1]
        return Rollouts(turns, reward.astype(np.float64), values)


@dataclass(frozen=True, slots=True)
class TrieWorld:
    """The recorded rollouts of a trie, drawn with replacement; see `recorded_world`.

    `members` int64 [num_trajectories] lists the rollouts by group, those of group g from `start[g]` on; `rollouts` are
    by trajectory; `value` float64 [num_groups] is each group's share of successes.
    """

    start: Int64
    members: Int64
    value: Float64
    rollouts: Rollouts

    def draw_prompts(self, count: int, random: np.random.Generator) -> tuple[Int64, Float64]:
        """Groups and their chances of success, with replacement only where there are fewer than `count`."""
        groups = len(self.value)
        found = random.choice(groups, count, replace=True) if count > groups else random.permutation(groups)[:count]
        return found, self.value[found]

    def roll_out(self, prompt: Int64, value: Float64, random: np.random.Generator) -> Rollouts:
        """One recorded rollout of each group `prompt`, drawn evenly."""
        sizes = np.diff(self.start)[prompt]
        found = self.members[self.start[prompt] + (random.random(len(prompt)) * sizes).astype(np.int64)]
        known = self.rollouts
        return Rollouts(known.num_turns[found], known.reward[found], known.value[found])


World = MarkovWorld | TrieWorld


def recorded_world(trie: Trie, *, segment: str = "turn", persistence: float = 4.0) -> TrieWorld:
    """Rollouts of `trie` to draw from, and a chance of success after each of their turns.

    A prompt's chance is its group's share of successes. That of a prefix through which n rollouts pass, s of which
    succeeded, is (s + p v) / (n + p), v being that of the prefix one turn shorter and p the `persistence`: as if p more
    rollouts had passed through it that behaved like that one's. With 0 a continuation is a recorded one, so below
    a prefix of a single rollout it always ends as that did, and nothing is left to find.

    Raises:
        TreepackError: a negative `persistence`, a reward that is not 0 or 1, or what `segment_tree` refuses.
    """
    if not 0 <= persistence < float("inf"):
        raise TreepackError(f"persistence is {persistence}; expected 0 or a positive number")
    reward = binary_rewards(trie)
    found = anchors(trie, segment=segment)
    tree = found.tree
    inner = tree.node < tree.num_inner
    passing = np.bincount(tree.node[inner], minlength=tree.num_inner)
    successes = np.bincount(tree.node[inner], weights=reward[tree.owner[inner]], minlength=tree.num_inner)
    value: Float64 = (successes / passing).astype(np.float64)
    for low, high in zip(tree.level_start[1:-1].tolist(), tree.level_start[2:].tolist(), strict=True):
        above = value[tree.parent[low:high]]
        value[low:high] = (successes[low:high] + persistence * above) / (passing[low:high] + persistence)
    num_turns = np.bincount(found.trajectory, minlength=trie.num_trajectories) + 1
    values = np.zeros((trie.num_trajectories, int(num_turns.max())))
    values[:, 0] = value[found.group]
    values[found.trajectory, found.turn] = value[found.node]
    start = np.searchsorted(np.sort(found.group), np.arange(tree.num_groups + 1))
    members = np.argsort(found.group, kind="stable")
    return TrieWorld(start, members, value[: tree.num_groups], Rollouts(num_turns, reward, values))
