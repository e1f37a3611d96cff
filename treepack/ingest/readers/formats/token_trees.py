"""Trees that trainers of trees take, as token ids: one trajectory per path from the root to a leaf.

    {"nodes": [{"parent": -1, "token_ids": [..], "loss_mask": [..], "advantage": 0.5}, {"parent": 0, ..}, ..]}
    {"prompt_ids": [..], "completions": [[..], ..]}

The first are prime-rl's: the loss of a tree is the mean over its K paths, so each path has weight 1/K and trains all
that its nodes mark. The second are Automodel's groups, whose completions are trained, from their first token on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers import graphs
from treepack.ingest.readers.fields import ReadOptions, as_number, shown
from treepack.ingest.readers.format import ANY, ARRAY, ARRAYS, FILLED, LINEAGE, MASKS, TOKEN_IDS, Format, first, no
from treepack.ingest.readers.formats import tokens
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.token_fields import mask_values
from treepack.ingest.readers.trajectories import without
from treepack.trajectory import Skipped, Trajectory


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of a tree, `<record>/leaf-<k>` from 0 in the order of the leaves, in a group of their own.

    Raises:
        TreepackError: neither kind of tree, a parent that is no earlier node, or what the `tokens` reader refuses.
    """
    value = record.value
    found = _of_nodes(record) if "nodes" in value else _of_completions(record)
    rest = without(value, ("nodes", "prompt_ids", "completions"))
    notes: set[str] = set()
    for leaf, fields in enumerate(found):
        named = {"trajectory_id": f"{record.label}/leaf-{leaf}", "group_id": record.source}
        for item in tokens.read(replace(record, value=named | rest | fields), options):
            if isinstance(item, Trajectory):
                item = replace(item, notes=tuple(note for note in item.notes if note not in notes))
                notes.update(item.notes)
            yield item


def _is_list(value: Any) -> bool:
    return isinstance(value, list | np.ndarray)


def _of_completions(record: Record) -> Iterator[dict[str, Any]]:
    for completion in record.value["completions"]:
        yield {"prompt_ids": record.value["prompt_ids"], "response_ids": completion}


def _mask(values: Any, num_tokens: int, where: str) -> Any:
    if not _is_list(values) or len(values) != num_tokens:
        raise TreepackError(
            f"{where} has the loss_mask {shown(values)}; expected one value for each of {num_tokens} tokens"
        )
    return mask_values(values, source=where, name="loss_mask")


def _of_nodes(record: Record) -> Iterator[dict[str, Any]]:
    """The fields of each path, for the reader of tokens."""
    nodes, source = record.value["nodes"], record.source
    paths = graphs.before(nodes, source=source)
    ids = graphs.ids_of(nodes, source=source)
    masks = [
        _mask(node.get("loss_mask"), len(own), f"{source}: node {number}")
        for number, (node, own) in enumerate(zip(nodes, ids, strict=True))
    ]
    given = [as_number(node.get("advantage") or 0.0, source=source, name="advantage") for node in nodes]
    parents = {path[-1] for path in paths if path}
    leaves = [number for number in range(len(nodes)) if number not in parents]
    for leaf in leaves:
        path = [*paths[leaf], leaf]
        fields: dict[str, Any] = {
            "input_ids": np.concatenate([ids[each] for each in path]),
            "loss_mask": np.concatenate([masks[each] for each in path]),
            "weight": 1 / len(leaves),
        }
        if any(given):  # they are 0 where nobody has set them
            fields["advantages"] = np.concatenate([np.full(len(ids[each]), given[each]) for each in path])
        yield fields


FORMAT = Format(
    name="token-trees",
    program="prime-rl (tree training), Automodel (prefix trees)",
    recognised_by="`nodes` with `token_ids` and `loss_mask`, or `prompt_ids` and `completions` as ids",
    requires=[
        {"nodes": first({"token_ids": ANY, "loss_mask": ANY})},
        {"nodes": no(FILLED), "prompt_ids": ARRAY, "completions": ARRAYS},
    ],
    used="nodes.parent nodes.token_ids nodes.loss_mask nodes.advantage prompt_ids completions".split(),
    keeps={TOKEN_IDS, MASKS, LINEAGE},
    read=read,
)
