"""Graphs of nodes that name their parent: each node is a message, or some tokens after its parent's tokens.

    node      0     1     2     3     4
    parent    -     0     1     1     3        before(4) = 0, 1, 3

A node that a model generated is a call, and the nodes before it are the prompt of the call. `token_calls` and
`chat_calls` join calls that continue each other, so every path from the root to a leaf becomes a trajectory. Tokens
that two paths share are trained in the first path only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treepack.calls.token_calls import TokenCall
from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject, shown
from treepack.trajectory import Int32, as_token_ids


def before(nodes: Sequence[JsonObject], *, source: str) -> list[list[int]]:
    """Return for each node the indices of the nodes before it on its path, from the root. O(sum of path lengths).

    The parent of a node must be an earlier node.

    Raises:
        TreepackError: a parent is not an earlier node.
    """
    paths: list[list[int]] = []
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        # The check of the type excludes -1.0 and, below, True, which equals 1.
        if parent is None or (parent == -1 and type(parent) is int):
            paths.append([])
            continue
        if type(parent) is not int or not 0 <= parent < number:
            raise TreepackError(
                f"{source}: node {number} has the parent {shown(parent)}; expected null or an earlier node"
            )
        paths.append([*paths[parent], parent])
    return paths


def node_call(ids: Sequence[Int32], path: Sequence[int], number: int, values: JsonObject) -> TokenCall:
    """Return the call that generated node `number`: the nodes of `path` are the prompt, the node is the response."""
    prompt = np.concatenate([ids[each] for each in path]) if path else np.zeros(0, np.int32)
    return TokenCall(prompt, ids[number], values)


def ids_of(nodes: Sequence[JsonObject], *, source: str) -> list[Int32]:
    """Return the `token_ids` of each node; empty for a node without them.

    Raises:
        TreepackError: `token_ids` is not a list of token ids.
    """
    results = []
    for number, node in enumerate(nodes):
        ids = node.get("token_ids")
        if ids is not None and not isinstance(ids, list | np.ndarray):
            raise TreepackError(f"{source}: node {number} has token_ids {shown(ids)}; expected a list")
        results.append(as_token_ids([] if ids is None else ids, source=f"{source}: node {number}", name="token_ids"))
    return results
