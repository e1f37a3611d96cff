"""Hypothesis generators of hard trees: shared prefixes, duplicates, prefixes of each other, single tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from treepack.pack.plan.problem import PlanTree
from treepack.ragged import RaggedArray
from treepack.sequences import STORED
from treepack.trajectory import Int32, Tokens, Trajectory

Nested = tuple[int, list["Nested"]]  # a node's tokens and its children


def make(
    name: str,
    tokens: list[int],
    *,
    spans: list[tuple[int, int, float]] | None = None,
    group: str = "g",
    step: int | None = None,
    weight: float = 1.0,
    **attributes: object,
) -> Trajectory:
    """A tokenised trajectory; every token but the first is trained unless `spans` says otherwise."""
    spans = [(1, len(tokens), 1.0)] if spans is None else spans
    starts, ends, weights = zip(*spans, strict=True) if spans else ((), (), ())
    # Names of a trie's columns, because `advantage` is a number of the whole trajectory.
    given = {name: attributes.pop(stored) for name, stored in STORED.items() if stored in attributes}
    per_token: dict[str, Any] = {
        key: value if isinstance(value, RaggedArray) else np.array(value) for key, value in given.items()
    }
    content = Tokens(
        np.array(tokens, np.int32),
        np.array(starts, np.int32),
        np.array(ends, np.int32),
        np.array(weights, np.float64),
        **per_token,
    )
    return Trajectory(name, f"made:{name}", content, group, step, weight, **attributes)  # type: ignore[arg-type]


@st.composite
def sequences(draw: st.DrawFn, *, max_count: int = 8, max_length: int = 9, min_length: int = 2) -> list[list[int]]:
    """Token lists over a tiny alphabet; later ones often branch off, repeat or extend an earlier one."""
    token = st.integers(0, 2)
    result: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_count))):
        start: list[int] = []
        branch: bool = draw(st.booleans())
        if result and branch:
            other = draw(st.sampled_from(result))
            start = other[: draw(st.integers(0, len(other)))]
        room = max_length - len(start)
        tail = draw(st.lists(token, min_size=max(0, min_length - len(start)), max_size=max(room, 0)))
        result.append(start + tail)
    return result


@st.composite
def spans(draw: st.DrawFn, length: int) -> list[tuple[int, int, float]]:
    """Trained spans of a sequence of `length` tokens: at least one trained token, never the first."""
    mask = [draw(st.sampled_from([0.0, 1.0, 1.0, 0.5])) for _ in range(length - 1)]
    if not any(mask):
        mask[draw(st.integers(0, length - 2))] = 1.0
    result: list[tuple[int, int, float]] = []
    for position, weight in enumerate(mask, start=1):
        if weight and result and result[-1][1] == position and result[-1][2] == weight:
            result[-1] = (result[-1][0], position + 1, weight)
        elif weight:
            result.append((position, position + 1, weight))
    return result


@st.composite
def trajectories(draw: st.DrawFn, *, max_count: int = 8, max_length: int = 9, steps: bool = True) -> list[Trajectory]:
    """Trajectories over `sequences` with masks, weights, groups, and sometimes training steps."""
    made = []
    several_steps = steps and draw(st.booleans())
    for i, tokens in enumerate(draw(sequences(max_count=max_count, max_length=max_length))):
        made.append(
            make(
                f"t{i}",
                tokens,
                spans=draw(spans(len(tokens))),
                group=draw(st.sampled_from(["g", "h"])),
                step=draw(st.integers(0, 1)) if several_steps else None,
                weight=draw(st.sampled_from([1.0, 1.0, 0.25, 3.0])),
            )
        )
    return made


def tree_of(nested: Nested, terms: list[int] | None = None) -> PlanTree:
    """The `PlanTree` of nested sizes, e.g. `(3, [(1, []), (2, [])])`; without `terms`, every leaf has one loss term."""
    size: list[int] = []
    depth: list[int] = []
    parent: list[int] = []
    open_nodes = [(nested, 0, -1)]
    while open_nodes:
        (tokens, children), above, up = open_nodes.pop()
        open_nodes.extend((child, above + tokens, len(size)) for child in reversed(children))
        size.append(tokens)
        depth.append(above)
        parent.append(up)
    end = list(range(1, len(size) + 1))
    for node in range(len(size) - 1, 0, -1):
        end[parent[node]] = max(end[parent[node]], end[node])
    leaf = [node for node in range(len(size)) if end[node] == node + 1]
    terms = [1] * len(leaf) if terms is None else terms
    return PlanTree(*(np.array(column, np.int64) for column in (size, depth, parent, end, leaf, terms)))


@st.composite
def trees(draw: st.DrawFn, *, max_leaves: int = 8, max_size: int = 9) -> PlanTree:
    """A planner's tree whose inner nodes branch: chains, stars, equal and single-token nodes, leaves of no tokens."""
    sizes = draw(st.sampled_from([st.integers(1, max_size), st.integers(1, 3), st.just(1), st.just(max_size)]))
    leaf_sizes = draw(st.sampled_from([sizes, st.integers(0, max_size)]))
    most_children = draw(st.sampled_from([2, 3, max_leaves]))

    def node(leaves: int) -> Nested:
        if leaves == 1:
            return draw(leaf_sizes), []
        children: list[Nested] = []
        while leaves:
            last = len(children) == most_children - 1
            share = leaves if last else draw(st.integers(1, leaves if children else leaves - 1))
            children.append(node(share))
            leaves -= share
        return draw(sizes), children

    num_leaves = draw(st.integers(1, max_leaves))
    nested = node(num_leaves)
    return tree_of(nested, draw(st.lists(st.integers(0, 4), min_size=num_leaves, max_size=num_leaves)))


@st.composite
def trees_and_capacities(draw: st.DrawFn, *, max_leaves: int = 8, max_size: int = 9) -> tuple[PlanTree, int]:
    """A tree and a capacity from that of its longest path, often just that, to that of the whole tree."""
    tree = draw(trees(max_leaves=max_leaves, max_size=max_size))
    longest = max(1, int(tree.length.max()))
    return tree, longest + draw(st.just(0) | st.integers(0, max(0, tree.tokens - longest)))


def random_sequences(*, seed: int) -> list[Int32]:
    """512 sequences of 2,048 to 4,096 tokens, shuffled: 32 groups of 16 over one common start of 256 tokens.

    Each of a group but the first forks off an earlier one at 45 to 100 % of its length.
    """
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 150_000, 256, dtype=np.int32)
    result: list[Int32] = []
    for _ in range(32):
        family: list[Int32] = []
        for _ in range(16):
            trunk = start
            if family:
                other = family[rng.integers(len(family))]
                trunk = other[: int(len(other) * rng.uniform(0.45, 1))]
            size = max(int(rng.integers(2048, 4097)), len(trunk) + 1)
            tail = rng.integers(0, 150_000, size - len(trunk), dtype=np.int32)
            family.append(np.concatenate([trunk, tail]))
        result += family
    return [result[i] for i in rng.permutation(len(result))]
