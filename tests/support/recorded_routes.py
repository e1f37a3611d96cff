"""Trajectories with recorded routes: equal, other and missing experts for shared prefixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from support.strategies import trajectories
from treepack.trajectory import Routes, Tokens, Trajectory, missing_route

# Sets of two of four experts in two layers: few, so that conflicts and agreements are both frequent.
ROWS = ([[0, 1], [2, 3]], [[1, 0], [2, 3]], [[0, 1], [3, 1]])
# The same with the last of 256 experts instead of the last of four.
ROWS_OF_256 = ([[0, 1], [2, 255]], [[1, 0], [2, 255]], [[0, 1], [255, 1]])


def with_routes(trajectory: Trajectory, routes: Routes | None) -> Trajectory:
    """The trajectory with `routes` of its tokens."""
    assert isinstance(trajectory.content, Tokens)
    return replace(trajectory, content=replace(trajectory.content, routes=routes))


@st.composite
def routed_trajectories(
    draw: st.DrawFn, *, dtype: type[np.unsignedinteger] = np.uint8, table: tuple[list[list[int]], ...] = ROWS
) -> list[Trajectory]:
    """Trajectories, most of them with two layers of two experts for some or all tokens; at least one has routes."""
    made = draw(trajectories(steps=False))
    result = []
    for i, each in enumerate(made):
        assert isinstance(each.content, Tokens)
        size = len(each.content.tokens)
        if i and draw(st.integers(0, 5)) == 0:
            result.append(each)
            continue
        rows = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=size, max_size=size))
        routes = np.array([table[row] for row in rows], dtype)
        routes[size - draw(st.integers(0, 1)) :] = missing_route(routes)  # the last token, which no sampler computes
        result.append(with_routes(each, routes))
    return result
