"""Rewards before advantages: less the divergence from a reference, and less a punishment of long answers.

    rewards, log-probabilities, lengths --shape_rewards--> ShapedRewards

With k_t the estimate of the divergence of the policy that sampled from the reference at trained token t, and |y| the
tokens of a trajectory from its first trained one on (of a rollout of several trajectories, the longest one counts):

    R' = R - beta * sum of k_t over the rollout      as verl's apply_kl_penalty and TRL's RLOO; gae subtracts beta * k_t
         - min(max(|y| - (LENGTH - BUFFER), 0) / BUFFER, 1)         DAPO's soft punishment (2503.14476, eq. 13)

The policy is that of the old log-probabilities if the rollouts have them, else the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.rollouts import TrieRollouts
from treepack.rl.segment_cuts import first_trained
from treepack.sequences import list_content
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class ShapedRewards:
    """Rewards of the trajectories of a trie.

    Attributes:
        reward: float64 [num_trajectories]; NaN if the trajectory has none.
        costs: float64 [trained tokens of all trajectories, in order], beta * k_t, subtracted already; or None.
        num_overlong: punished rollouts.
    """

    reward: Float64
    costs: Float64 | None
    num_overlong: int


def shape_rewards(trie: Trie, rollouts: TrieRollouts, options: AdvantageOptions) -> ShapedRewards:
    """Return the rewards that advantages are computed from.

    Raises:
        TreepackError: the options need log-probabilities that a trajectory lacks.
    """
    reward, costs, num_overlong = trie.trajectories["reward"].to_numpy().astype(np.float64), None, 0
    of, count = rollouts.of_trajectory, len(rollouts.first)
    if options.kl_in_reward:
        divergences, sizes = _divergences(trie, options.kl_estimator)
        costs = options.kl_in_reward * divergences
        reward = reward - np.bincount(np.repeat(of, sizes), costs, count)[of]
    if options.overlong is not None:
        limit, buffer = options.overlong
        longest = np.zeros(count)
        np.maximum.at(longest, of, trie.lengths - first_trained(trie, np.arange(trie.num_trajectories)))
        punished = np.clip((longest - (limit - buffer)) / buffer, 0, 1)
        num_overlong = int((punished > 0).sum())
        reward = reward - punished[of]
    return ShapedRewards(reward, costs, num_overlong)


def _divergences(trie: Trie, estimator: str) -> tuple[Float64, Int64]:
    """Return k_t of every trained token of all trajectories, in order, and the number of tokens of each trajectory.

    Raises:
        TreepackError: a trajectory has no log-probabilities of the reference, or some have none of a policy.
    """
    table = trie.trajectories
    policy = next((name for name in ("old_logprobs", "sampling_logprobs") if not table[name].null_count), None)
    if policy is None or table["ref_logprobs"].null_count:
        missing = "old_logprobs or sampling_logprobs" if policy is None else "ref_logprobs"
        raise TreepackError(
            f"kl_in_reward: not every rollout has {missing}; record them with the rollouts, or take "
            "`treepack train --kl`, whose reference `treepack logprobs --column ref` computes"
        )
    own, sizes = list_content(table[policy])
    x: Float64 = list_content(table["ref_logprobs"])[0].astype(np.float64) - own
    if estimator == "k1":
        return -x, sizes
    return (x * x / 2 if estimator == "k2" else np.expm1(x) - x), sizes
