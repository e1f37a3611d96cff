"""File formats as Arrow schemas: the single source of truth for every column, its type and its meaning.

    trie/    nodes-*.parquet (NODES, plus NODE_VALUES and ROUTES if known)  manifest.json
             trajectories-*.parquet (TRAJECTORIES, plus columns of OPTIONAL if known)
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
from typing import Any

import pyarrow as pa

TRIE_FORMAT = "treepack-trie"
PACKED_FORMAT = "treepack-packed"
FORMAT_VERSION = 1  # of both directories; raise it when an older treepack could not read the new files
SELECTION_FORMAT = "treepack-selection"
SELECTION_VERSION = 1

SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("weight", pa.float64())])


_INT32S, _STRINGS = pa.list_(pa.int32()), pa.list_(pa.string())
_FLOAT32S, _FLOAT64S = pa.list_(pa.float32()), pa.list_(pa.float64())
_ID_LISTS, _FLOAT32_LISTS = pa.list_(pa.large_list(pa.int32())), pa.list_(pa.large_list(pa.float32()))


# Parquet stores these descriptions, so a changed word changes the bytes and the sha256 of every new file.
def _field(name: str, kind: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"description": description})


_optional = partial(_field, nullable=True)

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


def ragged_dtype(column: str) -> Any:
    """Return the numpy type of the numbers in a column of `RAGGED`."""
    return RAGGED.field(column).type.value_type.value_type.to_pandas_dtype()


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
        _optional("advantage", pa.float64(), "advantage of the whole trajectory"),
        _optional("advantages", _FLOAT64S, "advantage per trained token"),
        _optional("sampling_logprobs", _FLOAT32S, "sampler's log-probability per trained token"),
        _optional("old_logprobs", _FLOAT32S, "trainer's old log-probability per trained token"),
        _optional("ref_logprobs", _FLOAT32S, "reference log-probability per trained token"),
        _field("metadata", pa.string(), "JSON object of further fields"),
        _field("source", pa.string(), "file and line it was read from"),
    ]
)

# Further columns of the trajectories of a trie; each exists only if a trajectory has such a value. Only commands write
# those of CREDIT.
_TEMPERATURES = pa.schema(
    [
        _optional("temperature", pa.float64(), "sampler's temperature for the whole trajectory"),
        _optional("temperatures", _FLOAT32S, "sampler's temperature per trained token"),
    ]
)


CREDIT = pa.schema(
    [
        _optional("returns", _FLOAT64S, "return per trained token, the target of the critic"),
        _optional("old_values", _FLOAT64S, "critic's old value per trained token, of the state before the token"),
        _optional(
            "edge_factors",
            _FLOAT64S,
            "factor per trained token that gives each compared edge of its sampled tree a total loss weight of 1; 0 on "
            "other edges",
        ),
    ]
)
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
TEACHER = pa.schema(
    [
        _optional("teacher_logprobs", _FLOAT32S, "teacher's log-probability per trained token"),
    ]
)
# Columns with a list of numbers per trained token; see `treepack.ragged`.
RAGGED = pa.schema(
    [
        _optional(
            "kept_ids",
            _ID_LISTS,
            "token ids that top-p, top-k or min-p left, ascending, per trained token; an empty list is the whole "
            "vocabulary",
        ),
        _optional("teacher_topk_ids", _ID_LISTS, "likeliest token ids of a teacher per trained token"),
        _optional("teacher_topk_logprobs", _FLOAT32_LISTS, "log-probability of each of teacher_topk_ids"),
    ]
)
RECORDED = pa.schema([*_TEMPERATURES, *ROLLOUTS, *TEACHER, *RAGGED])  # those that rollouts may have
OPTIONAL = pa.schema([*_TEMPERATURES, *CREDIT, *ROLLOUTS, *TEACHER, *RAGGED])


TRIE = {"nodes": pa.schema([*NODES, *NODE_OPTIONAL]), "trajectories": pa.schema([*TRAJECTORIES, *OPTIONAL])}
"""All columns that the parts of a trie may have, by the first word of their names."""


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

# One entry per term, a (trajectory, trained token) pair of the row, or per trajectory; null if it has no such value.
TERMS = pa.schema(
    [
        _field("term_token", _INT32S, "row index of the predicted token"),
        _field("term_trajectory", _INT32S, "index into trajectory_ids"),
        _field("term_weight", _FLOAT64S, "loss weight of the pair; summed per token it is loss_weight"),
        _optional("term_advantage", _FLOAT64S, "advantage"),
        _optional("term_sampling_logprob", _FLOAT32S, "sampler's log-probability"),
        _optional("term_old_logprob", _FLOAT32S, "trainer's old log-probability"),
        _optional("term_ref_logprob", _FLOAT32S, "reference log-probability"),
        _optional("term_entropy", _FLOAT32S, "entropy of its distribution, in nats"),
        _optional("trajectory_rewards", _FLOAT64S, "reward of each trajectory"),
        _optional(
            "trajectory_rollouts",
            _INT32S,
            "index into trajectory_ids of the first trajectory of the row that belongs to the same rollout; -1 for a "
            "turn on several paths of a search tree",
        ),
        _optional(
            "trajectory_weights",
            _FLOAT64S,
            "weight of each trajectory, with its leaf weight; the column is missing if all are 1",
        ),
        _optional("term_temperature", _FLOAT32S, "sampler's temperature, rounded to float32: 0.7 becomes 0.69999999"),
        _optional("term_return", _FLOAT64S, "return, the target of the critic"),
        _optional("term_old_value", _FLOAT64S, "critic's old value of the state before the token"),
        _optional(
            "term_edge_factor", _FLOAT64S, "factor that gives each edge of the sampled tree a total loss weight of 1"
        ),
        _optional("term_teacher_logprob", _FLOAT32S, "teacher's log-probability"),
        _optional(
            "term_kept_ids",
            _ID_LISTS,
            "token ids that top-p, top-k or min-p left, ascending; an empty list is the whole vocabulary",
        ),
        _optional("term_teacher_topk_ids", _ID_LISTS, "likeliest token ids of a teacher"),
        _optional("term_teacher_topk_logprobs", _FLOAT32_LISTS, "log-probability of each of term_teacher_topk_ids"),
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
