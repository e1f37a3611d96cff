"""A sampled tree as the lines of a file: one record for each leaf, in the format "tokens" of `treepack build-trie`.

    Tree --tree_records--> [{"rollout_id": "task-7/0", "prompt_token_ids": [..], "response_ids": [..], ...}, ...]
         --tree_trajectories--> [Trajectory, ...]      the same without a file, for `build_trie`

                 prompt     node 1        node 2
        path     1 2 3   |  4 5 | 6    |  7 8       6 is the observation after node 1
        ids      [1 2 3]   [4 5   6       7 8]      prompt_token_ids, response_ids
        mask               [1 1   0       1 1]      response_mask
        segments            3             6         and segment_ids 1, 2

docs/rollouts.md lists the fields.
"""

from __future__ import annotations

import base64
import functools
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from treepack.ingest.readers.fields import token_fields as tf
from treepack.ingest.readers.fields.rewards import REWARDS
from treepack.ingest.readers.fields.rollout_facts import (
    GROUPS,
    IDS,
    MAX_METADATA,
    METADATA_DICTS,
    SAMPLING_DICTS,
    STEPS,
)
from treepack.ingest.readers.tokens.token_records import read_tokens
from treepack.rollout.engine import derived_seed
from treepack.rollout.query import Query
from treepack.rollout.tree import Tree, TreeNode, weights_of_leaves
from treepack.trajectory import Trajectory

OWN_FIELDS = (
    "rollout_id group_id step prompt_token_ids response_ids response_mask rollout_log_probs temperature reward "
    "segments segment_ids leaf_weight leaf_weight_before_fallback finish fallback policy_version metadata "
    "parent_rollout parent_tokens num_leaves weight routed_experts"
).split()


def name_of_query(query: Query) -> str:
    """Return the common part of the ids of a query's rollouts, distinct over steps: "task-7", or "task-7:step-3"."""
    # The key of a prefix contains the id of its parent rollout, so it is distinct already.
    is_distinct = query.step is None or query.parent_rollout is not None
    return query.key if is_distinct else f"{query.key}:step-{query.step}"


def tree_lines(tree: Tree) -> bytes:
    """Return the records of a tree as JSON lines."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    return b"".join(orjson.dumps(record, option=options) for record in tree_records(tree))


def tree_records(tree: Tree) -> list[dict[str, Any]]:
    """Return one record for each leaf of `tree`, in the order in which the paths ended; lists are numpy arrays."""
    query, (weights, before) = tree.query, weights_of_leaves(tree)
    has_fallback = any(node.is_fallback for node in tree.nodes())
    common: dict[str, Any] = {"group_id": query.group_id}
    if query.step is not None:
        common["step"] = query.step
    common["prompt_token_ids"] = tree.root.tokens
    records = []
    for number, leaf in enumerate(tree.leaves):
        record = {"rollout_id": f"{name_of_query(query)}/{number}", **common, **_path_fields(leaf, query)}
        record["temperature"] = tree.sampling.temperature
        if leaf.reward is not None:
            record["reward"] = leaf.reward
        record["finish"] = leaf.finish
        record["num_leaves"] = len(tree.leaves)
        record["leaf_weight"] = float(weights[number])
        if has_fallback:
            record["leaf_weight_before_fallback"] = float(before[number])
        if any(node.is_fallback for node in leaf.path()):
            record["fallback"] = True
        if query.parent_rollout is not None:
            record |= {"parent_rollout": query.parent_rollout, "parent_tokens": len(query.prompt)}
        if query.untrained_prefix is not None:
            record["untrained_prefix"] = query.untrained_prefix
        records.append(record | _copied_fields(query.fields, frozenset(record)))
    return records


def tree_trajectories(tree: Tree) -> list[Trajectory]:
    """Return the trajectory of each leaf of `tree`, as if the records had been written to a file and read from it."""
    # The reader of the format imports parsers of files; writing records needs none of them.
    from treepack.files.input_files.records import Record
    from treepack.ingest.readers.fields.read_options import ReadOptions

    read = [
        item
        for record in tree_records(tree)
        for item in read_tokens(Record(record["rollout_id"], tree.query.source, record), ReadOptions(keep_routes=True))
    ]
    trajectories = [item for item in read if isinstance(item, Trajectory)]
    assert len(trajectories) == len(tree.leaves)  # every path has a sampled token, so the reader skips none
    return trajectories


def _path_fields(leaf: TreeNode, query: Query) -> dict[str, Any]:
    """Return the fields that depend on the nodes of a path: tokens, log-probabilities, segments and versions."""
    nodes = leaf.path()[1:]
    ids, mask, logprobs = [], [], []
    for node in nodes:
        # No token is sampled after an observation that ends a path, so a record does not contain it.
        observation = node.observation[:0] if node is leaf else node.observation
        ids += [node.tokens, observation]
        mask += [np.ones(len(node.tokens), np.uint8), np.zeros(len(observation), np.uint8)]
        if node.logprobs is not None:
            logprobs += [node.logprobs, np.zeros(len(observation), np.float32)]
    fields: dict[str, Any] = {"response_ids": np.concatenate(ids), "response_mask": np.concatenate(mask)}
    if all(node.logprobs is not None for node in nodes):
        fields["rollout_log_probs"] = np.concatenate(logprobs).astype(np.float32)
    if (routes := path_routes(leaf)) is not None:
        data = base64.b64encode(routes.astype(routes.dtype.newbyteorder("<")).tobytes()).decode()
        fields["routed_experts"] = {"data": data, "shape": list(routes.shape), "dtype": routes.dtype.name}
    # A continuation of a rollout without recorded segments has none either: a group has them for all or for none.
    if query.parent_rollout is None or query.cuts:
        fields["segments"] = [*query.cuts, *(node.start for node in nodes)]
        if len(query.cut_ids) == len(query.cuts):
            fields["segment_ids"] = [*query.cut_ids, *(_segment_id(node, query) for node in nodes)]
    return fields | _versions(nodes)


def path_routes(leaf: TreeNode) -> NDArray[np.integer[Any]] | None:
    """Return the experts of the tokens of a path but the last sampled one, [n, layers, k]; None if some are unknown."""
    routes = [node.routes for node in leaf.path()[1:]]
    # Types may differ: experts up to 255 are uint8, and larger ones in a later segment uint16.
    known = [each for each in routes if each is not None]
    return np.concatenate(known) if known and len(known) == len(routes) else None


def _segment_id(node: TreeNode, query: Query) -> int:
    """Return a number that two records of a group have in common exactly if they contain the same sampled node."""
    # Several queries may belong to one group: its prompt, and prefixes of its rollouts. Numbers 1, 2, ... are the
    # prompt's; the others are 62-bit hashes, which never meet in practice.
    return node.number if query.key == query.group_id else derived_seed(query.key, node.number)


def _versions(nodes: list[TreeNode]) -> dict[str, Any]:
    """Return the policy that sampled the path, and each one with its first token if it changed on the way."""
    # versions 7 7 8 of nodes that start at 3, 6, 9 -> [("7", 3), ("8", 9)]
    runs: list[tuple[str, int]] = []
    for node in nodes:
        if node.version and (not runs or runs[-1][0] != node.version):
            runs.append((node.version, node.start))
    if not runs:
        return {}
    named = {"policy_version": ",".join(version for version, _ in runs)}
    return named if len(runs) == 1 else named | {"metadata": {"policy_versions": runs}}


def _copied_fields(fields: dict[str, Any], present: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a query's own record that its rollouts repeat: short values under names without a meaning.

    A name by which `build-trie` recognises or reads another format is left out, because the records would be read as
    that format.
    """
    return {
        name: value
        for name, value in fields.items()
        if name not in present and name not in _reserved_names() and _is_short(value)
    }


def _is_short(value: Any) -> bool:
    if not isinstance(value, str | int | float):
        return False
    try:
        return len(orjson.dumps(value)) <= MAX_METADATA
    except orjson.JSONEncodeError:  # an integer beyond 64 bits, or text that is not Unicode
        return False


@functools.cache
def _reserved_names() -> frozenset[str]:
    # Imported here, because it imports all readers.
    from treepack.ingest.readers.fields.unread import MASKS
    from treepack.ingest.readers.registry import all_formats

    # Names of usual layouts, such as `solution`, are free: the ids of a rollout decide its format.
    known = {name for each in all_formats() for name in each.required_fields()}
    reader = {*IDS, *GROUPS, *STEPS, *REWARDS, *SAMPLING_DICTS, *METADATA_DICTS, *tf.KINDS}
    return frozenset(
        {*known, *MASKS, *OWN_FIELDS, *reader, "advantage", "untrained_prefix", "trial", "reward_info", "text"}
    )
