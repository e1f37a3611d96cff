"""Trees as trainers on trees take them, as token ids: one trajectory per path from the root to a leaf.

    {"nodes": [{"parent": -1, "token_ids": [..], "loss_mask": [..], "advantage": 0.5}, {"parent": 0, ..}, ..]}
    {"prompt_ids": [..], "completions": [[..], ..]}

The first form is prime-rl's. The loss of a tree is the mean over its K paths, so each path has weight 1/K and trains
all tokens that its nodes mark. The second form is a group of Automodel, whose completions are trained from their first
token on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.calls import node_graphs as graphs
from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Trajectory,
    TreepackError,
    mask_values,
    read_tokens,
    shown,
    without,
)
from treepack.ingest.readers.fields.token_fields import LABELS, MASK, NAMES
from treepack.ingest.readers.fields.values import as_number
from treepack.ingest.readers.kinds import ARRAY


def _read_token_trees(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of a tree, `<record>/leaf-<k>` from 0 in the order of the leaves, which form one group.

    Raises:
        TreepackError: a parent that is not an earlier node, or an error of the `tokens` reader.
    """
    value = record.value
    if outside := sorted({*NAMES[MASK], *NAMES[LABELS]} & value.keys()):
        raise TreepackError(f"{record.source}: {outside[0]} is beside the tree; expected it in its nodes")
    leaves = _of_nodes(record) if "nodes" in value else _of_completions(record)
    rest = without(value, ("nodes", "prompt_ids", "completions"))
    notes: set[str] = set()
    for leaf, fields in enumerate(leaves):
        # All leaves of a tree have the same group, because they answer the same task.
        named = {"trajectory_id": f"{record.label}/leaf-{leaf}", "group_id": record.source}
        for item in read_tokens(replace(record, value=named | rest | fields), options):
            if isinstance(item, Trajectory):
                # A note that every path repeats is counted once.
                item = replace(item, notes=tuple(note for note in item.notes if note not in notes))
                notes.update(item.notes)
            yield item


def _of_completions(record: Record) -> Iterator[JsonObject]:
    for completion in record.value["completions"]:
        yield {"prompt_ids": record.value["prompt_ids"], "response_ids": completion}


def _mask(values: Any, num_tokens: int, where: str) -> Any:
    if not ARRAY.test(values) or len(values) != num_tokens:
        raise TreepackError(
            f"{where} has the loss_mask {shown(values)}; expected one value for each of {num_tokens} tokens"
        )
    return mask_values(values, source=where, name="loss_mask")


def _of_nodes(record: Record) -> Iterator[JsonObject]:
    """Yield the fields of each path under names that the reader of tokens reads."""
    nodes, source = record.value["nodes"], record.source
    # paths[3] = [0, 1]: the nodes before node 3, from the root
    paths = graphs.before(nodes, source=source)
    ids = graphs.ids_of(nodes, source=source)
    masks = [
        _mask(node.get("loss_mask"), len(node_ids), f"{source}: node {number}")
        for number, (node, node_ids) in enumerate(zip(nodes, ids, strict=True))
    ]
    advantages = [as_number(node.get("advantage") or 0.0, source=source, name="advantage") for node in nodes]
    # parents [-1, 0, 0, 1] -> paths [], [0], [0], [0, 1] -> inner nodes {0, 1} -> leaves [2, 3]
    parents = {path[-1] for path in paths if path}
    leaves = [number for number in range(len(nodes)) if number not in parents]
    for leaf in leaves:
        path = [*paths[leaf], leaf]
        fields: JsonObject = {
            "input_ids": np.concatenate([ids[each] for each in path]),
            "loss_mask": np.concatenate([masks[each] for each in path]),
            "weight": 1 / len(leaves),
        }
        if any(advantages):  # 0 is the default of a node
            fields["advantages"] = np.concatenate([np.full(len(ids[each]), advantages[each]) for each in path])
        yield fields


FORMAT = Format(
    name="token-trees",
    rank=490,
    program="prime-rl (tree training), Automodel (prefix trees)",
    recognised_by="`nodes` with `token_ids` and `loss_mask`, or `prompt_ids` and `completions` as ids",
    requires="nodes:first(token_ids, loss_mask); nodes:!filled, prompt_ids:array, completions:arrays",
    used="nodes.parent nodes.token_ids nodes.loss_mask nodes.advantage prompt_ids completions",
    keeps="token ids, masks, lineage",
    read=_read_token_trees,
)
