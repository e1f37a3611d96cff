"""Generalised advantage estimation along each path of a tree, from a critic's value after each token.

    Trie with token_values, trajectories --state_values--> value before each trained token, value after the last token
    these, rewards, truncated ends --gae--> advantage of each trained token;  return = advantage + value

        tokens   1 2 3 | 4 5 | 6 6 | 7 8         4 5 and 7 8 are trained, 6 6 is an observation
        values   . . a   b .   . c   d e         V = a b c d: the value before a trained token is that after its parent
                                                 V_5 = 0 at an end, e if the trajectory was truncated

Only trained tokens are steps. The state after trained token i is the state before trained token i + 1, so an
observation between the two is part of the transition (Schulman et al. 2015, arXiv 1506.02438, equations 11 and 16):

    delta_i = r_i + gamma V_(i+1) - V_i        r_i = 0, and the reward at the last trained token
    A_i     = delta_i + gamma lambda A_(i+1)

With gamma = lambda = 1, A_i is the reward minus V_i, and with lambda = 0 it is delta_i. The papers of PROS and TRACE
name no gamma and lambda. verl's defaults are 1 and 1; TRL's PPO has 1 and 0.95, the values here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.metadata import parse_metadata
from treepack.ingest.readers.fields.rollout_facts import marked
from treepack.rl.advantages.advantage_options import GAMMA, LAMBDA
from treepack.rl.advantages.flat import magnitudes, means, standardise
from treepack.rl.group_tree import node_paths, token_places
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie

# Texts of fields such as `TRUNCATED_KEY` that name a limit instead of an end. `treepack rollout` writes length and
# depth, SkyRL's stop_reason has length, slime's status truncated, and rLLM's termination_reason the names with
# "exceeded". APIs and harnesses write max_tokens and max_turns.
LIMITS = frozenset(
    (
        "length depth max_tokens max_turns truncated max_turns_exceeded max_prompt_length_exceeded "
        "max_response_length_exceeded"
    ).split()
)


def gae(
    value: Float64,
    last_value: Float64,
    reward: Float64,
    offsets: Int64,
    *,
    costs: Float64 | None = None,
    gamma: float = GAMMA,
    lam: float = LAMBDA,
) -> Float64:
    """Return the advantage of each trained token, float64 [num_trained]; see the header.

    O(num_trained) in time, in as many numpy steps as the longest trajectory has trained tokens.

    Args:
        value: float64 [num_trained], V_i of the trained tokens of all trajectories, one trajectory after the other.
        last_value: float64 [n], the value after each trajectory: 0 at an end.
        reward: float64 [n].
        offsets: int64 [n + 1]; trajectory k has the trained tokens offsets[k] .. offsets[k + 1] - 1.
        costs: float64 [num_trained], subtracted from the reward of each token; None for 0.
        gamma: discount per trained token.
        lam: lambda, the share of later differences.
    """
    sizes = np.diff(offsets)
    order = np.argsort(-sizes, kind="stable")
    # Sizes [2, 0, 3] -> order [2, 0, 1]. From the ends: 2 trajectories have a last token, 2 a second, 1 a third one.
    counts = np.searchsorted(-sizes[order], -np.arange(1, int(sizes.max(initial=0)) + 1), side="right")
    advantage = np.zeros(len(value))
    ends = offsets[1:][order]
    following, later, earned = last_value[order], np.zeros(len(order)), reward[order]
    for k, count in enumerate(counts.tolist(), start=1):
        at = ends[:count] - k
        delta = earned[:count] + gamma * following[:count] - value[at]
        if costs is not None:
            delta = delta - costs[at]
        later = delta + gamma * lam * later[:count]
        advantage[at] = later
        following = value[at]
        earned = np.zeros(count)
    return advantage


def state_values(trie: Trie, trajectory: Int64, position: Int64, kept: Int64) -> tuple[Float64, Float64]:
    """Return the value before each trained token, and the value after the last token of each trajectory of `kept`.

    `trajectory` and `position`, int64 [num_trained], belong to the trained tokens: indices into `kept`, and places
    on the path, at least 1. O(num_trained log depth).

    Raises:
        TreepackError: the trie has no values.
    """
    if trie.token_values is None:
        raise TreepackError(
            "the trie has no token_values, the values of a critic, which gae needs; write them with `treepack critic`, "
            "or give --values zero if there is no critic yet"
        )
    paths = node_paths(trie)
    # The token at position 3 is predicted in the state after the token at position 2.
    before = token_places(trie, paths, kept[trajectory], position - 1)
    last = token_places(trie, paths, kept, trie.lengths[kept] - 1)
    return trie.token_values[before], trie.token_values[last]


def is_truncated(trie: Trie, kept: Int64, key: str) -> NDArray[np.bool_] | None:
    """Return True for each trajectory of `kept` that a limit cut off, bool [num_kept].

    The field `key` of its metadata, or of a metadata object in it (`rollout_facts.marked`), is then True, or one of
    `LIMITS`. Every other value, and a missing field, is an end. With the `key` "none", no trajectory was cut off.
    Return None if no trajectory has such a field.
    """
    if key == "none":
        return np.zeros(len(kept), np.bool_)
    texts, sources = (trie.trajectories[name].to_pylist() for name in ("metadata", "source"))
    values = [marked(parse_metadata(texts[i], sources[i]), key) for i in kept.tolist()]
    if all(value is None for value in values):
        return None
    return np.array([value is True or (isinstance(value, str) and value in LIMITS) for value in values], np.bool_)


def whiten(advantage: Float64, scope: Int64, *, epsilon: float) -> Float64:
    """Subtract the mean of the advantages of each scope and divide by their deviation (n - 1) plus `epsilon`.

    `scope` int64 [num_trained] has codes from 0. Every trained token counts the same, as in verl's `masked_whiten`. A
    scope of one token, and one of equal advantages, gets 0.
    """
    apart = advantage - means(advantage, scope)[scope]
    return standardise(apart, scope, magnitudes(advantage, scope), epsilon=epsilon)
