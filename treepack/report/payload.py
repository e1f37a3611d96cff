"""The data that the explorer of a page reads: columns of the forest, names and texts, compressed, as base64.

    Trie, ExplorerParts, PageContents --payload--> {name: base64 of gzip}
    the same --explorer_settings--> {name: JSON value}, which the explorer reads first

Little-endian arrays: per node its length and its parent as the distance back to it, 0 at a root; per trajectory its end
node as the distance from the previous one, its rollout, turn, part, reward and advantage, NaN if unknown; per segment
its length and kind. JSON for the rest. Base64 has no character that HTML could read as markup, whatever a rollout
contains.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.analysis.part_notes import part_notes
from treepack.report.contents import PageContents
from treepack.report.parts import SharedParts, rewards_of
from treepack.report.roles import ROLES
from treepack.report.rollouts import ExplorerParts, PartOutcomes
from treepack.report.words import printable
from treepack.sequences import list_values
from treepack.trajectory import Float64
from treepack.trie.trie import Trie


def payload(trie: Trie, lists: ExplorerParts, contents: PageContents) -> dict[str, str]:
    """Return the blocks of the page: `forest-*`, `segment-*`, `sample-*`, `groups-*`, `trees-*`, `text-0`, ..."""
    each, rollouts, segments = np.arange(trie.num_nodes), lists.rollouts, contents.segments
    # Distances are small numbers, which compress well: parents [-1, 0, 1, 1] -> up [0, 1, 1, 2]
    blocks = {
        "forest-size": _array(trie.node_length, "<u4"),
        "forest-up": _array(np.where(trie.parent < 0, 0, each - trie.parent), "<u4"),
        "segment-size": _array(np.diff(segments.first), "<u4"),
        "segment-kind": _array(segments.kind, "u1"),
        "segment-count": _array(np.diff(segments.of_node), "<u4"),
        "sample-end": _array(np.diff(trie.end_node, prepend=0), "<u4"),
        "sample-rollout": _array(rollouts.of, "<u4"),
        "sample-number": _array(rollouts.number, "<u4"),
        "sample-reward": _array(rewards_of(trie), "<f4"),
        "sample-advantage": _array(mean_advantages(trie), "<f4"),
        "sample-ids": _json([*map(printable, trie.trajectories["trajectory_id"].to_pylist())]),
        "sample-notes": _json([*map(printable, part_notes(trie))]),
        "rollout-labels": _json([*map(printable, rollouts.labels)]),
    }
    pairs = (("groups", lists.groups, lists.group_outcomes), ("trees", lists.trees, lists.tree_outcomes))
    for name, parts, outcomes in pairs:
        blocks |= {f"{name}-{key}": block for key, block in _parts(parts, outcomes).items()}
    if contents.texts is not None:
        blocks |= {f"text-{i}": compress(chunk) for i, chunk in enumerate(contents.texts.chunks)}
    return blocks


def explorer_settings(lists: ExplorerParts, contents: PageContents) -> dict[str, Any]:
    """Return the settings of the explorer's scripts: JSON values."""
    texts = contents.texts
    return {
        "text": "none" if texts is None else "text" if contents.decoded else "ids",
        "firstNode": [] if texts is None else texts.first_node,
        # Longest first, because the page joins them into one pattern, which takes the first match.
        "special": sorted(contents.special, key=lambda token: (-len(token), token)),
        "kept": None if texts is None else texts.kept,
        "roles": list(ROLES) if contents.headers else [],
        "headers": [header.text.rstrip() for header in contents.headers],
        "group": lists.opened_group,
        "samplesAreRollouts": len(lists.rollouts.names) == len(lists.rollouts.of),
    }


def mean_advantages(trie: Trie) -> Float64:
    """Return the advantage of each trajectory, or the mean over its trained tokens if they have one; NaN if unknown."""
    scalars: Float64 = trie.trajectories["advantage"].combine_chunks().to_numpy(zero_copy_only=False).astype(np.float64)
    if trie.trajectories["advantages"].null_count == trie.num_trajectories:
        return scalars
    lists = list_values(trie.trajectories, "advantages")
    means = [
        scalar if values is None or not len(values) else values.mean()
        for values, scalar in zip(lists, scalars, strict=True)
    ]
    return np.array(means, np.float64)


def _parts(parts: SharedParts, outcomes: PartOutcomes) -> dict[str, str]:
    return {
        "names": _json([*map(printable, parts.names)]),
        "of": _array(parts.of, "<u4"),
        "flat": _array(parts.flat, "<f8"),  # JavaScript reads 64-bit integers only as BigInt; floats are exact to 2**53
        "tree": _array(parts.tree, "<f8"),
        "spread": _array(outcomes.spread, "<f4"),
        "one": _array(outcomes.is_one, "u1"),
    }


def _array(values: NDArray[Any], kind: str) -> str:
    return compress(np.ascontiguousarray(values.astype(kind)).tobytes())


def _json(value: Any) -> str:
    # "replace": a lone surrogate, which JSON of rollouts may contain, has no UTF-8.
    return compress(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))


def compress(content: bytes, level: int = 6) -> str:
    """Return gzip in base64."""
    # mtime=0: without a time stamp, equal content gives equal bytes.
    return base64.b64encode(gzip.compress(content, level, mtime=0)).decode("ascii")
