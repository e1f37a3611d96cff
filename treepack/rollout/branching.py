"""The forks of a level, and the nodes that a fallback returns to.

5 forks for the active paths a, b  --even--> 3, 2 or 2, 3      --likely--> by a softmax over log-probabilities, >= 1
"""

from __future__ import annotations

import numpy as np

from treepack.errors import TreepackError
from treepack.rollout.options import TreeOptions
from treepack.rollout.tree import FINISHED_WELL, TreeNode
from treepack.trajectory import Float64, Int64


def level_forks(
    active: list[TreeNode], *, level: int, first: int, num_leaves: int, options: TreeOptions, rng: np.random.Generator
) -> Int64:
    """Return the number of continuations of each `active` path, at least 1 each; int64 [len(active)].

    The tree has first * branches**level paths at `level` if none ends early. All of them are divided among the active
    paths, so ended paths transfer their budget (TreePO, section 2.2); leaves and paths never exceed the width.
    """
    room = options.width - num_leaves
    # Python integers, because 2**1000 overflows int64: the power is only needed up to the room.
    total = max(len(active), min(room, first * options.branches ** min(level, room)))
    if options.branching == "even":
        shares = np.full(len(active), 1 / len(active))
    else:
        shares = _softmax(_mean_logprobs(active), level, options)
    # Every path has one continuation; the rest is divided by the shares.
    return 1 + divide(total - len(active), shares, rng)


def divide(total: int, shares: Float64, rng: np.random.Generator) -> Int64:
    """Divide `total` by the `shares`, which sum to 1, with the largest remainders; `rng` orders equal ones."""
    # total 5, shares [1/2, 1/2] -> exact [2.5, 2.5] -> [2, 2], and one of the two gets the fifth.
    exact = total * shares
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.lexsort((rng.permutation(len(shares)), -np.round(exact - counts, 9)))
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def _mean_logprobs(active: list[TreeNode]) -> Float64:
    means = [float(np.mean(node.logprobs)) for node in active if node.logprobs is not None]
    if len(means) < len(active):
        raise TreepackError("the engine returns no log-probabilities to branch by; use --branching even")
    return np.array(means)


def _softmax(logprobs: Float64, level: int, options: TreeOptions) -> Float64:
    begin, end = options.branching_temperature
    # depth 4 -> levels 1, 2, 3 have forks, with progress 0, 1/2, 1.
    progress = min(1.0, (level - 1) / (options.depth - 2)) if options.depth and options.depth > 2 else 0.0
    scores = (logprobs if options.branching == "likely" else -logprobs) / (begin + (end - begin) * progress)
    powers = np.exp(scores - scores.max())
    shares: Float64 = powers / powers.sum()
    return shares


def fallback_forks(leaves: list[TreeNode], *, options: TreeOptions, rng: np.random.Generator) -> dict[TreeNode, int]:
    """Return the nodes to continue again, and how often, so that the tree reaches its width.

    Leaves are drawn among leaves that ended with an answer or a stop token, or among all if there are none. Each one is
    cut at a random start of one of its segments, never inside, and gets `branches` new continuations (TreePO, section
    2.2).
    """
    missing = options.width - len(leaves)
    candidates = [leaf for leaf in leaves if leaf.finish in FINISHED_WELL] or leaves
    forks: dict[TreeNode, int] = {}
    while missing > 0:
        path = candidates[int(rng.integers(len(candidates)))].path()
        # path [root, A, B]: B is a leaf, so its segments start after root and after A.
        node = path[int(rng.integers(len(path) - 1))]
        count = min(options.branches, missing)
        forks[node] = forks.get(node, 0) + count
        missing -= count
    return forks
