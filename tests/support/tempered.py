"""Hypothesis generators of trajectories with the temperatures of their sampler, and what each token was sampled at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from support import strategies
from treepack.trajectory import Float32, Tokens, Trajectory

TEMPERATURES = (0.0, 0.5, 0.7, 1.0)


@st.composite
def tempered(draw: st.DrawFn, *, max_count: int = 4, reward: bool = True) -> list[Trajectory]:
    """Trajectories without a temperature, with one, or with one for each trained token, of which some are missing."""
    return [
        replace(draw(_one(item)), reward=1.0 if reward else None)
        for item in draw(strategies.trajectories(max_count=max_count))
    ]


@st.composite
def _one(draw: st.DrawFn, item: Trajectory) -> Trajectory:
    kind = draw(st.sampled_from(["none", "one", "each"]))
    if kind == "one":
        return replace(item, temperature=draw(st.sampled_from(TEMPERATURES)))
    if kind == "none":
        return item
    assert isinstance(item.content, Tokens)
    size = item.content.num_trained
    values = draw(st.lists(st.sampled_from([*TEMPERATURES, np.nan]), min_size=size, max_size=size))
    return replace(item, content=replace(item.content, temperature=np.array(values, np.float32)))


def token_temperatures(item: Trajectory) -> Float32:
    """The temperature of each trained token, float32 [num_trained], NaN if it is missing."""
    assert isinstance(item.content, Tokens)
    if item.content.temperature is not None:
        return item.content.temperature
    value = np.nan if item.temperature is None else item.temperature
    return np.full(item.content.num_trained, value, np.float32)
