"""Hypothesis generators of trajectories with the sets of token ids that their sampler kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from support import strategies
from treepack.ragged import RaggedArray
from treepack.trajectory import Tokens, Trajectory, positions

VOCABULARY = 6  # of the sets; the tokens of `strategies.sequences` are below 3


@st.composite
def kept(draw: st.DrawFn, *, max_count: int = 4) -> list[Trajectory]:
    """Trajectories with rewards, without sets or with one for each trained token, of which some are empty."""
    return [replace(draw(_with_sets(item)), reward=1.0) for item in draw(strategies.trajectories(max_count=max_count))]


@st.composite
def _with_sets(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    content = item.content
    assert isinstance(content, Tokens)
    if draw(st.booleans()):
        return item
    others = st.lists(st.integers(0, VOCABULARY - 1), max_size=3)
    sampled = content.tokens[positions(content.starts, content.ends)].tolist()
    sets = [sorted({token, *draw(others)}) if draw(st.integers(0, 4)) else [] for token in sampled]
    lists = RaggedArray.of(sets, np.int32)
    return replace(item, content=replace(content, kept_ids=lists if len(lists.flat) else None))


def token_sets(item: Trajectory) -> list[list[int]]:
    """The set of each trained token, empty if it is the whole vocabulary."""
    assert isinstance(item.content, Tokens)
    lists = item.content.kept_ids
    return as_lists(RaggedArray.empty(item.content.num_trained, np.int32) if lists is None else lists)


def as_lists(lists: RaggedArray) -> list[list[int]]:
    return [lists.list(i).tolist() for i in range(len(lists))]
