"""Rollouts in memory: their log-probabilities, computed on trees, in the shape of the caller.

sequences     a padded, jagged or listed batch as one array of tokens
planning      its trie, and the sequences of each row
batch         the rows as tensors, and the way back to the shape of the caller
statistics    log-probabilities and entropies, one row in memory at a time
losses        the policy losses of `treepack train` on their result
ranks         the number of rows that several ranks run
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treepack.online.batch import OnlineBatch, plan_batch
from treepack.online.options import OnlineOptions

if TYPE_CHECKING:
    from treepack.online.losses import sequence_loss
    from treepack.online.ranks import agree_on_rows
    from treepack.online.statistics import batch_statistics, row_statistics, tree_logprobs_like

__all__ = [
    "OnlineBatch",
    "OnlineOptions",
    "agree_on_rows",
    "batch_statistics",
    "plan_batch",
    "row_statistics",
    "sequence_loss",
    "tree_logprobs_like",
]


def __getattr__(name: str) -> Any:
    # The planner alone, in a process that prepares batches, does not wait for the imports of the model half.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "agree_on_rows":
        from treepack.online.ranks import agree_on_rows

        return agree_on_rows
    if name == "sequence_loss":
        from treepack.online.losses import sequence_loss

        return sequence_loss
    from treepack.online import statistics

    return getattr(statistics, name)
