"""Default capacities for a trie, and the treatment of trajectories that are longer than a capacity."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.options import ANY_LENGTH, TOO_LONG
from treepack.rl.rollout_parts import LOST_PARTS
from treepack.sequences import STORED
from treepack.trajectory import Tokens, Trajectory, positions
from treepack.trie.builders.out_of_core import rebuild
from treepack.trie.trie import Trie, trajectories_of

# Row lengths that training runs use: a common context length, and about the longest that fits one GPU.
_USUAL_CAPACITIES = (16_384, 65_536)
TOO_LONG_DROPPED = "dropped: longer than the capacity"
NO_TOKEN_WITHIN = "dropped: no trained token within the capacity"


def usual_capacities(trie: Trie) -> list[int]:
    """Return the usual capacities that the longest trajectory of `trie` fits, ascending, or else the next power of two.

    The first one is the default of `pack`.
    """
    return usual_capacities_of(int(trie.lengths.max()))


def usual_capacities_of(longest: int) -> list[int]:
    """Return the `usual_capacities` of a trie whose longest trajectory has `longest` tokens."""
    return [size for size in _USUAL_CAPACITIES if size >= longest] or [1 << (longest - 1).bit_length()]


def fit_capacity(trie: Trie, capacity: int, *, too_long: str) -> tuple[Trie, Counter[str]]:
    """Drop or truncate trajectories longer than `capacity`; return the trie that is left, and counts.

    Truncation keeps the first `capacity` tokens. A trajectory without a trained token among them is dropped.

    Raises:
        TreepackError: no trajectory is left, or `too_long` is unknown.
    """
    if too_long not in TOO_LONG:
        raise TreepackError(f"too_long is {too_long!r}; expected one of {', '.join(TOO_LONG)}")
    counts: Counter[str] = Counter()
    if too_long == "error" or not (trie.lengths > capacity).any():
        return trie, counts

    lost: set[tuple[str, str]] = set()

    def fit_all() -> Iterator[Trajectory]:
        for trajectory, length in zip(trajectories_of(trie), array("q", trie.lengths.tobytes()), strict=True):
            if length <= capacity:
                yield trajectory
                continue
            shorter = None if too_long == "drop" else _truncated(trajectory, capacity)
            if shorter is None:
                counts[TOO_LONG_DROPPED if too_long == "drop" else NO_TOKEN_WITHIN] += 1
                if trajectory.rollout_id is not None:
                    lost.add((trajectory.rollout_id, trajectory.source))
                    counts[LOST_PARTS] = len(lost)
            else:
                yield shorter
                counts["truncated to the capacity"] += 1
                counts["tokens cut off"] += length - capacity

    trajectories = fit_all()
    first = next(trajectories, None)
    if first is None:
        raise no_trajectory_fits(capacity)
    return rebuild(trie, chain([first], trajectories)), counts


def no_trajectory_fits(capacity: int) -> TreepackError:
    """Return the error for a trie whose trajectories are all too long."""
    return TreepackError(f"no trajectory fits the capacity of {capacity}; raise the capacity: {ANY_LENGTH}")


def _truncated(trajectory: Trajectory, capacity: int) -> Trajectory | None:
    content = trajectory.content
    assert isinstance(content, Tokens)
    # Spans [2, 4) and [7, 12) within 9 tokens -> [2, 4) and [7, 9), and the first 2 + 2 values per trained token.
    kept = content.starts < capacity
    if not kept.any():
        return None
    num_trained = int((positions(content.starts, content.ends) < capacity).sum())
    per_token = {name: getattr(content, name) for name in STORED}
    cut = {name: None if values is None else values[:num_trained] for name, values in per_token.items()}
    shorter = Tokens(
        content.tokens[:capacity],
        content.starts[kept],
        np.minimum(content.ends[kept], capacity).astype(np.int32),
        content.span_weights[kept],
        **cut,
        routes=None if content.routes is None else content.routes[:capacity],
    )
    return replace(trajectory, content=shorter)
