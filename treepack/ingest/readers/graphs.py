"""Graphs of nodes that name their predecessor: each node a message, or the tokens that it adds to what is before it.

    node      0     1     2     3     4
    parent    -     0     1     1     3        before(4) = 0, 1, 3

A node that a model generated is a call, whose prompt is what is before it; `calls.py` joins those that continue each
other, so that every path from the root to a leaf is a trajectory and what two paths share is trained in the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.calls import TokenCall
from treepack.ingest.readers.fields import shown
from treepack.trajectory import Int32, as_token_ids


def before(nodes: Sequence[dict[str, Any]], *, source: str, start: int = 0) -> list[list[int]]:
    """For each node the numbers of those before it on its path, from the root on. O(sum of the paths' lengths).

    `start` is the number of the first node. A node's parent comes before it.

    Raises:
        TreepackError: a parent that is no earlier node.
    """
    paths: list[list[int]] = []
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is None or (parent == -1 and type(parent) is int):
            paths.append([])
            continue
        if type(parent) is not int or not start <= parent < start + number:
            raise TreepackError(
                f"{source}: node {start + number} has the parent {shown(parent)}; expected null or an earlier node"
            )
        paths.append([*paths[parent - start], parent - start])
    return paths


def node_call(ids: Sequence[Int32], path: Sequence[int], number: int, values: dict[str, Any]) -> TokenCall:
    """The call that generated node `number`: the nodes of `path` are its prompt, the node's ids its response."""
    prompt = np.concatenate([ids[each] for each in path]) if path else np.zeros(0, np.int32)
    return TokenCall(prompt, ids[number], values)


def ids_of(nodes: Sequence[dict[str, Any]], *, source: str) -> list[Int32]:
    """The `token_ids` of each node, none where it has none.

    Raises:
        TreepackError: no list of token ids.
    """
    found = []
    for number, node in enumerate(nodes):
        ids = node.get("token_ids")
        if ids is not None and not isinstance(ids, list | np.ndarray):
            raise TreepackError(f"{source}: node {number} has token_ids {shown(ids)}; expected a list")
        found.append(as_token_ids([] if ids is None else ids, source=f"{source}: node {number}", name="token_ids"))
    return found
