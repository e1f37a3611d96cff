"""Paths of the leaves of a search tree, which logs store as nodes inside nodes.

{name: "root", children: [{name: "a"}, {name: "b", children: [{name: "c"}, {name: "d"}]}]}
    --leaf_paths-->  root a    root b c    root b d
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treepack.ingest.readers.fields import as_objects


def leaf_paths(root: dict[str, Any], *, source: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the nodes from `root` to each leaf, in depth-first order. O(sum of the lengths of the paths).

    Raises:
        TreepackError: `children` of a node is neither null nor a list of objects.
    """
    # A stack instead of recursion, because a search may be deeper than Python's stack. `path` is cut to the depth of
    # the next node: root b c, then d at depth 2 -> root b d.
    path: list[dict[str, Any]] = []
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        del path[depth:]
        path.append(node)
        children = as_objects(node.get("children"), source=source, name="children")
        stack += [(child, depth + 1) for child in reversed(children)]
        if not children:
            yield list(path)
