"""File formats as Arrow schemas: the single source of truth for every column, its type and its meaning.

    trie/    nodes-*.parquet (NODES, plus NODE_VALUES and ROUTES if known)  manifest.json
             trajectories-*.parquet (TRAJECTORIES, plus columns of OPTIONAL if known)
             renamed-*.parquet (RENAMED, if ids repeat)
    packed/  part-*.parquet (ROWS, plus TERMS if trajectories carry rewards or log-probabilities, plus ROUTES if known)
             manifest.json
    the state of treepack select, one Parquet file (QUERIES)

The metadata of each field contains its description. `python -m treepack.files.schema DIR` writes the formats as JSON
for other programs; treepack itself does not read those files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.columns import COLUMNS, COMPUTED, OF_TRAJECTORY, Column, Lists

TRIE_FORMAT = "treepack-trie"
PACKED_FORMAT = "treepack-packed"
FORMAT_VERSION = 1  # of both directories; raise it when an older treepack could not read the new files
SELECTION_FORMAT = "treepack-selection"
SELECTION_VERSION = 1

SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("weight", pa.float64())])


_INT32S, _STRINGS = pa.list_(pa.int32()), pa.list_(pa.string())
_FLOAT64S = pa.list_(pa.float64())


# Parquet stores these descriptions, so a changed word changes the bytes and the sha256 of every new file.
def _field(name: str, kind: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"description": description})


_optional = partial(_field, nullable=True)


def _list_type(column: Column) -> pa.DataType:
    """Return the type of a cell with all entries of a column of the table."""
    number = pa.from_numpy_dtype(np.dtype(column.kind.dtype))
    return pa.list_(pa.large_list(number) if isinstance(column.kind, Lists) else number)


def _stored(columns: Iterable[Column]) -> list[pa.Field]:
    """Return the columns of the trajectories of a trie for columns of the table."""
    fields = []
    for column in columns:
        if column.whole is not None:
            fields.append(_optional(column.whole, pa.float64(), column.whole_doc))
        if column.stored is not None:
            text = column.stored_doc or f"{column.packed_doc} per trained token"
            fields.append(_optional(column.stored, _list_type(column), text))
    return fields


def _packed(columns: Iterable[Column]) -> list[pa.Field]:
    """Return the columns of packed rows for columns of the table."""
    return [_optional(column.packed, _list_type(column), column.packed_doc) for column in columns]


# One row per node of a trie.
NODES = pa.schema(
    [
        _field("tree_id", pa.int32(), "tree of the forest, 0-based; the node ids of a tree are contiguous"),
        _field("node_id", pa.int32(), "position of the node in depth-first order over the whole forest"),
        _field("parent_id", pa.int32(), "node_id of the parent, -1 at a root"),
        _field("depth", pa.int32(), "tokens on the path before this node"),
        _field("tokens", _INT32S, "the node's own token ids, at least one"),
        _field("num_trajectories", pa.int32(), "trajectories that pass through the node or end in it"),
    ]
)

# Further columns of the nodes of a trie, which exist only if a command has written them.
NODE_VALUES = pa.schema(
    [
        _field(
            "token_values",
            _FLOAT64S,
            "critic's value after each of the node's own tokens: the expected rest of the return",
        ),
    ]
)


# Columns of nodes and of rows with the experts that a sampler's routers chose; they exist only if those were kept.
ROUTES = pa.schema(
    [
        _field("route_layers", pa.int32(), "layers with recorded experts: all layers, or those with routers"),
        _field("route_experts", pa.int32(), "experts of each token in a layer"),
        _field(
            "routes",
            pa.binary(),
            "experts of each token of its own, [tokens, route_layers, route_experts] as uint8, or little-endian uint16 "
            "if an expert is above 255 (254 if route_experts is 1); the largest value of the type in all of a layer "
            "where none was recorded",
        ),
    ]
)
NODE_OPTIONAL = pa.schema([*NODE_VALUES, *ROUTES])


def is_ragged(kind: pa.DataType) -> bool:
    """Return True for the type of a column with a list of lists of numbers in each cell."""
    return bool(pa.types.is_list(kind) and pa.types.is_large_list(kind.value_type))


def node_columns(names: Iterable[str]) -> pa.Schema:
    """Return `NODES` and those columns of `NODE_OPTIONAL` that are among `names`."""
    known = set(names)
    return pa.schema([*NODES, *(field for field in NODE_OPTIONAL if field.name in known)])


# One row per trajectory of a trie. Weights and advantages are float64; log-probabilities are float32, as samplers give
# them.
TRAJECTORIES = pa.schema(
    [
        _field("trajectory_id", pa.string(), "unique in the directory"),
        _field("group_id", pa.string(), "prompt or task whose rollouts are compared (GRPO's group)"),
        _optional("step", pa.int64(), "training step that sampled it; steps never share a tree or a row"),
        _field("tree_id", pa.int32(), "tree that holds it"),
        _field("node_id", pa.int32(), "node at whose last token it ends"),
        _field("num_tokens", pa.int32(), "tokens from the root to its end"),
        _field("trained", pa.list_(SPAN), "trained tokens: spans [start, end) of positions and their loss weight"),
        _field("weight", pa.float64(), "factor of all its loss weights"),
        _optional("reward", pa.float64(), "reward of the whole trajectory"),
        *_stored(column for column in COLUMNS if column.is_always),
        _field("metadata", pa.string(), "JSON object of further fields"),
        _field("source", pa.string(), "file and line it was read from"),
    ]
)

# Further columns of the trajectories of a trie; each exists only if a trajectory has such a value.
ROLLOUTS = pa.schema(
    [
        _optional(
            "rollout_id",
            pa.string(),
            "rollout that has become several trajectories, of which this is one; they have one source",
        ),
        _optional(
            "rollout_part",
            pa.int64(),
            "ascends over the trajectories of a rollout; -1 for a turn on several paths of a search tree",
        ),
    ]
)
_FIRST = COLUMNS[: COLUMNS.index(COMPUTED[-1]) + 1]  # those before the rollouts, in the order of files
OPTIONAL = pa.schema(
    [
        *_stored(column for column in _FIRST if not column.is_always),
        *ROLLOUTS,
        *_stored(column for column in COLUMNS if column not in _FIRST),
    ]
)
_COMPUTED_NAMES = {column.stored for column in COMPUTED}
_RECORDED = pa.schema(
    [field for field in OPTIONAL if field.name not in _COMPUTED_NAMES]
)  # those that rollouts may have


# One row per trajectory whose id another one has too, by source, id and arrival. A later build that reads the trie
# gives the same names as if it had read the rollouts.
RENAMED = pa.schema(
    [
        _field("trajectory_id", pa.string(), "the id in the trie, which no other trajectory has"),
        _field("read_id", pa.string(), "the id that was read"),
    ]
)

TRIE = {"nodes": pa.schema([*NODES, *NODE_OPTIONAL]), "trajectories": pa.schema([*TRAJECTORIES, *OPTIONAL])}
"""All columns that the parts of a trie with its tokens may have, by the first word of their names."""


def trajectory_columns(names: Iterable[str]) -> pa.Schema:
    """Return `TRAJECTORIES` and those columns of `OPTIONAL` that are among `names`."""
    known = set(names)
    return pa.schema([*TRAJECTORIES, *(field for field in OPTIONAL if field.name in known)])


# One row per packed row. The per-token lists are int32 and the pairs int64: a row of 100,000 tokens has 5e9 pairs.
ROWS = pa.schema(
    [
        _field("row_id", pa.int64(), "position of the row in the directory"),
        _optional("step", pa.int64(), "training step of its trajectories"),
        _field("num_tokens", pa.int32(), "tokens in the row, at most the capacity"),
        _field("num_pairs", pa.int64(), "attention score pairs: sum of position_ids + 1"),
        _field("total_weight", pa.float64(), "sum of loss_weight; the loss of a step divides by its sum over rows"),
        _field("input_ids", _INT32S, "token ids, depth-first"),
        _field("position_ids", _INT32S, "tokens before it on its own path"),
        _field("parent", _INT32S, "row index of the token before it on its path, -1 at a root"),
        _field("subtree_end", _INT32S, "one past the last token of its subtree: q sees k if k <= q < subtree_end[k]"),
        _field("scale", _INT32S, "trajectories of this row that pass through the token"),
        _field("loss_weight", _FLOAT64S, "sum over those trajectories of their own loss weight at the token"),
        _field("trajectory_ids", _STRINGS, "trajectories of this row, by where they end"),
        _field("trajectory_groups", _STRINGS, "group_id of each trajectory"),
        _field("trajectory_ends", _INT32S, "row index of the last token of each trajectory"),
    ]
)

# Files have the columns of trajectories between columns of trained tokens, after the entropies.
_NUM_BEFORE = 1 + [column.name for column in COLUMNS].index("entropy")

# One entry per term, a (trajectory, trained token) pair of the row, or per trajectory; null if it has no such value.
TERMS = pa.schema(
    [
        _field("term_token", _INT32S, "row index of the predicted token"),
        _field("term_trajectory", _INT32S, "index into trajectory_ids"),
        _field("term_weight", _FLOAT64S, "loss weight of the pair; summed per token it is loss_weight"),
        *_packed(COLUMNS[:_NUM_BEFORE]),
        *_packed(OF_TRAJECTORY),
        *_packed(COLUMNS[_NUM_BEFORE:]),
    ]
)

PACKED = pa.schema([*ROWS, *TERMS, *ROUTES])  # all columns that a part of a packed directory may have

# One row per query. The metadata of the file has the format, the version and `num_updates`, the training steps counted.
QUERIES = pa.schema(
    [
        _field("query_id", pa.string(), "unique; queries are sorted by it"),
        _optional("parent_id", pa.string(), "original query that it was derived from; null if it is one"),
        _field("passed", pa.float64(), "rollouts that succeeded, those long ago counting less"),
        _field("tried", pa.float64(), "rollouts in all, those long ago counting less"),
    ]
)


def schema_as_json(schema: pa.Schema) -> dict[str, dict[str, str | bool]]:
    """Return the columns of `schema` as `{name: {type, nullable, description}}`."""
    return {
        field.name: {
            "type": str(field.type),
            "nullable": field.nullable,
            "description": field.metadata[b"description"].decode(),
        }
        for field in schema
    }


def documents() -> dict[str, str]:
    """Return the content of every file in schemas/, by file name."""
    trie = {
        "nodes": schema_as_json(node_columns(NODE_OPTIONAL.names)),
        "trajectories": schema_as_json(trajectory_columns(OPTIONAL.names)),
        "renamed": schema_as_json(RENAMED),
    }
    packed = {"rows": schema_as_json(ROWS), "terms": schema_as_json(TERMS), "routes": schema_as_json(ROUTES)}
    formats = {
        "trie.json": (TRIE_FORMAT, FORMAT_VERSION, trie),
        "packed.json": (PACKED_FORMAT, FORMAT_VERSION, packed),
        "selection.json": (SELECTION_FORMAT, SELECTION_VERSION, {"queries": schema_as_json(QUERIES)}),
    }
    return {
        name: json.dumps({"format": form, "version": version, "files": files}, indent=2) + "\n"
        for name, (form, version, files) in formats.items()
    }


if __name__ == "__main__":
    for file_name, text in documents().items():
        Path(sys.argv[1], file_name).write_text(text)
