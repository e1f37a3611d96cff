"""A made-up critic whose value depends on all tokens of a path, for tries and for trajectories alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from treepack.trie.nodes import paths
from treepack.trie.trie import Trie


def value_after(tokens: Iterable[int]) -> float:
    """The value in the state after `tokens`, between -1 and 1."""
    state = 0.0
    for token in tokens:
        state = math.sin(3.0 * state + token + 1.0)
    return state


def with_values(trie: Trie) -> Trie:
    """The trie with the value after each of its tokens."""
    values = np.zeros(trie.tokens_tree)
    for path in paths(trie.end_node, trie.node_start, trie.depth):
        ids = trie.tokens[path].tolist()
        values[path] = [value_after(ids[: i + 1]) for i in range(len(ids))]
    return replace(trie, token_values=values)
