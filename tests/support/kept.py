"""Sets of token ids that a sampler kept, as plain lists."""

from __future__ import annotations

import numpy as np

from treepack.ragged import RaggedArray
from treepack.trajectory import Tokens, Trajectory


def token_sets(item: Trajectory) -> list[list[int]]:
    """The set of each trained token, empty if it is the whole vocabulary."""
    assert isinstance(item.content, Tokens)
    lists = item.content.kept_ids
    return as_lists(RaggedArray.empty(item.content.num_trained, np.int32) if lists is None else lists)


def as_lists(lists: RaggedArray) -> list[list[int]]:
    return [lists.list(i).tolist() for i in range(len(lists))]
