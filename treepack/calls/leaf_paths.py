"""Paths of the leaves of a tree, which logs store as nodes inside nodes.

{name: "root", children: [{name: "a"}, {name: "b", children: [{name: "c"}, {name: "d"}]}]}
    --leaf_paths-->  root a    root b c    root b d

A reader of trees names the fields of nodes that it does not read (`unused_fields`), because a format declares only the
fields of records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject, as_objects, shown

# Fields that may hold an answer or a part of one, a mask, or a preference. A node that has one unknown to its reader is
# refused, because the rest of the node would be trained without it.
_ANSWERS = frozenset(
    """
    message messages text content completion completions response responses output outputs answer answers chosen
    rejected generation generations generated_text raw_output prediction prompt value thought thoughts thinking
    action actions observation tool_results token_ids input_ids tokens logprobs mask loss_mask response_mask
    assistant_mask train train_detail label labels advantages
    """.split()
)


def leaf_paths(root: JsonObject, *, source: str, name: str = "children") -> Iterator[list[JsonObject]]:
    """Yield the nodes from `root` to each leaf, in depth-first order. O(sum of the lengths of the paths).

    `name` is the field of a node that has the list of its children.

    Raises:
        TreepackError: `children` of a node is neither null nor a list of objects.
    """
    # A stack instead of recursion, because a search may be deeper than Python's stack. `path` is cut to the depth of
    # the next node: root b c, then d at depth 2 -> root b d.
    path: list[JsonObject] = []
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        del path[depth:]
        path.append(node)
        children = as_objects(node.get(name), source=source, name=name)
        stack += [(child, depth + 1) for child in reversed(children)]
        if not children:
            yield list(path)


def nodes_of(root: JsonObject, *, name: str = "children") -> Iterator[JsonObject]:
    """Yield `root` and all nodes below it, in depth-first order."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        children = node.get(name)
        stack += [
            child for child in reversed(children if isinstance(children, list) else []) if isinstance(child, dict)
        ]


def distinct_paths(paths: Iterable[list[JsonObject]]) -> list[list[JsonObject]]:
    """Return the `paths` of one tree without empty and repeated ones, and without beginnings of longer ones."""
    # A node has one path, so a path that ends at an inner node of a longer path is its beginning.
    by_end = {id(path[-1]): path for path in paths if path}
    inner = {id(node) for path in by_end.values() for node in path[:-1]}
    return [path for end, path in by_end.items() if end not in inner]


def unused_fields(nodes: Iterable[JsonObject], known: Collection[str], *, source: str) -> tuple[str, ...]:
    """Return a note for each field of `nodes` that is not in `known` and is not null, in the order of the nodes.

    Raises:
        TreepackError: such a field may hold an answer or a mask (`_ANSWERS`).
    """
    names: dict[str, None] = {}
    for node in nodes:
        for name, value in node.items():
            if name in known or value is None or name in names:
                continue
            # {"text": "a", "value": 0.5}: the value of a search is a number, an answer is not.
            is_number = isinstance(value, int | float) and name in ("value", "tokens")
            if name in _ANSWERS and not is_number:
                raise TreepackError(
                    f"{source}: a node has the field {name} with {shown(value)}, which is not understood beside its "
                    "other fields; remove it, or write the node's text in one field"
                )
            names[name] = None
    return tuple(f"node field '{name}' not used" for name in names)
