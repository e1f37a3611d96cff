"""Reasons for which a path ends, checked after each segment."""

from __future__ import annotations

import numpy as np

from treepack.rollout.engine import STOP
from treepack.rollout.options import TreeOptions
from treepack.rollout.tree import ANSWER, REPETITION, TOO_DEEP, TOO_LONG, TreeNode
from treepack.trajectory import Int32

MAX_PERIOD = 64  # tokens: longer runs are seldom repeated exactly, and the check costs time linear in the period
MIN_REPEATED = 64  # tokens: a ruler of 20 dashes or the digits of 1/3 are not a failure


def ending(node: TreeNode, finish: str, *, num_prompt: int, options: TreeOptions) -> str | None:
    """Return the reason for which the path of a new `node` ends, or None if it continues.

    An answer has priority, then repetition, then the limits. `finish` is that of the engine: a stop token ends the
    turn, which is left to the environment.
    """
    if options.is_answer is not None and options.is_answer(node.turn):
        return ANSWER
    if finish == STOP:
        return None
    if options.max_repeats and ends_in_repeats(node.turn, options.max_repeats):
        return REPETITION
    return limit(node, num_prompt=num_prompt, options=options)


def limit(node: TreeNode, *, num_prompt: int, options: TreeOptions) -> str | None:
    """Return the limit that the path of `node` has reached, or None."""
    if node.end - num_prompt >= options.max_tokens:
        return TOO_LONG
    return TOO_DEEP if options.depth is not None and node.depth >= options.depth else None


def ends_in_repeats(ids: Int32, times: int) -> bool:
    """Return True if `ids` ends with `times` or more copies of a run of at most `MAX_PERIOD` tokens.

    The copies must be `MIN_REPEATED` tokens or more in total. The ids are the whole turn, so a repetition counts
    even if segments cut it.
    """
    # 5 1 2 1 2: the last token, 2, occurs two tokens earlier, so 2 is the only possible period.
    for period in (1 + np.flatnonzero(ids[-2 : -MAX_PERIOD - 2 : -1] == ids[-1:])).tolist():
        # 5 | 1 2 1 2 1 2: with period 2, the last 6 tokens are 3 copies if each equals the token 2 before it.
        size = max(times, -(-MIN_REPEATED // period)) * period
        if size > len(ids):
            continue
        if (ids[len(ids) - size + period :] == ids[len(ids) - size : len(ids) - period]).all():
            return True
    return False
