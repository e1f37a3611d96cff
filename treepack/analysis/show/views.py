"""What `treepack show` shows: a group's tree, a trajectory or a packed row, with what is known of it, as lines or JSON.

    Trie, Trajectory, Row --> View(facts, forest) --lines--> Line, Line, ...
                                                  --as_json--> {"kind": ..., facts, "nodes": [...]}

Facts have the names of `treepack stats --json` and of the columns on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treepack.analysis.show import selection
from treepack.analysis.show.bodies import Look, segments
from treepack.analysis.show.decoding import CONTEXT, Decoder
from treepack.analysis.show.drawing import path_lines, row_lines, tree_lines
from treepack.analysis.show.figures import Quantiles, spread
from treepack.analysis.show.forest import (
    DrawnForest,
    forest_of_row,
    forest_of_trajectory,
    forest_of_trie,
    path_of_row,
    path_of_trie,
    trained_runs,
)
from treepack.analysis.show.wrapping import Line, StyledText, printable, shortened, width_of
from treepack.files.manifest import Manifest
from treepack.pack.row import Row
from treepack.trajectory import Trajectory
from treepack.trie.build import build_trie
from treepack.trie.trie import Trie, trajectories_of

GROUPS = 10
NAMES = ("trajectory_id", "group_id", "source")  # never shortened, for one would copy them to ask for more


@dataclass(frozen=True, slots=True)
class View:
    """A forest of a `kind`, "tree", "trajectory" or "row", and the facts that stand above it; None is unknown."""

    kind: str
    facts: dict[str, Any]
    forest: DrawnForest


def group_view(trie: Trie, group_id: str, *, where: str) -> View:
    """The tree of one group alone: what it shares with other groups counts for nothing.

    Raises:
        TreepackError: there is no such group.
    """
    members = selection.members(trie, group_id, where=where)
    own = build_trie(trajectories_of(selection.subset(trie, members)), share=trie.share)
    forest = forest_of_trie(own)
    facts = {
        "group_id": group_id,
        "num_trajectories": own.num_trajectories,
        "num_trees": own.num_trees,
        "num_nodes": own.num_nodes,
        "tokens_flat": own.tokens_flat,
        "tokens_tree": own.tokens_tree,
        "por": 1 - own.tokens_tree / own.tokens_flat,
        "rewards": spread(forest.endings.reward),
    }
    return View("tree", facts, forest)


def trajectory_views(trie: Trie, wanted: str, *, where: str) -> Iterator[View]:
    """The trajectories of a trie that `wanted` names, with how many share each part of their paths.

    Raises:
        TreepackError: there is none.
    """
    for i in selection.trajectories(trie, wanted, where=where):
        (trajectory,) = trajectories_of(selection.subset(trie, [i]))
        yield View("trajectory", _facts(trajectory), path_of_trie(trie, trajectory, int(trie.end_node[i])))


def rollout_view(trajectory: Trajectory) -> View:
    """A tokenised rollout by itself."""
    return View("trajectory", _facts(trajectory), forest_of_trajectory(trajectory))


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    forest = forest_of_trajectory(trajectory)
    trained = forest.loss_weight != 0
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "step": trajectory.step,
        "num_tokens": len(forest.tokens),
        "tokens_trained": int(trained.sum()),
        "num_turns": trained_runs(forest.loss_weight),
        "weight": trajectory.weight,
        "reward": trajectory.reward,
        "advantage": trajectory.advantage,
        "source": trajectory.source,
        "metadata": trajectory.metadata or None,
        "notes": "; ".join(trajectory.notes) or None,
    }


def row_view(row: Row, manifest: Manifest) -> View:
    """A packed row."""
    forest = forest_of_row(row)
    facts = {
        "row_id": row.row_id,
        "num_rows": manifest["totals"]["num_rows"],
        "step": row.step,
        "num_tokens": row.num_tokens,
        "capacity": manifest["capacity"],
        "num_trajectories": len(row.trajectory_ids),
        "num_groups": len(set(row.trajectory_groups)),
        "num_trees": int((forest.parent < 0).sum()),
        "num_nodes": forest.num_nodes,
        "num_pairs": row.num_pairs,
        "tokens_trained": int((row.loss_weight != 0).sum()),
        "total_weight": row.total_weight,
        "num_terms": None if row.terms is None else len(row.terms.token),
    }
    return View("row", facts, forest)


def row_trajectory_view(row: Row, trajectory: int) -> View:
    """One trajectory as a packed row has it; shared tokens have everyone's weight where the row has no terms."""
    forest = path_of_row(row, trajectory)
    facts = {
        "trajectory_id": row.trajectory_ids[trajectory],
        "group_id": row.trajectory_groups[trajectory],
        "row_id": row.row_id,
        "step": row.step,
        "num_tokens": len(forest.tokens),
        "tokens_trained": int((forest.loss_weight != 0).sum()),
        "reward": _known(forest.endings.reward[0]),
        "advantage": _known(forest.endings.advantage[0]),
        "notes": "weights are those of all trajectories of the row that share a token" if row.terms is None else None,
    }
    return View("trajectory", facts, forest)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def lines(view: View, look: Look) -> Iterator[Line]:
    """The facts, a blank line, and the drawing."""
    yield from _fact_lines(view.facts, look)
    yield ()
    draw = {"tree": tree_lines, "trajectory": path_lines, "row": row_lines}[view.kind]
    yield from draw(view.forest, look)


def _fact_lines(facts: dict[str, Any], look: Look) -> Iterator[Line]:
    """Names and values, as many on a line as fit."""
    line: list[StyledText] = []
    taken = 0
    for name, value in facts.items():
        if value is None or (name, value) == ("weight", 1):
            continue
        shown = _text(name, value)
        if name not in NAMES:
            shown = shortened(shown, max(10, look.width - len(name) - 1))
        size = len(name) + 1 + width_of(shown)
        if line and taken + 3 + size > look.width:
            yield tuple(line)
            line, taken = [], 0
        line += [StyledText(("   " if line else "") + f"{name} ", "faint"), StyledText(shown, "name")]
        taken += size + (3 if taken else 0)
    yield tuple(line)


def _text(name: str, value: Any) -> str:
    if name == "por":
        return f"{100 * value:.1f} %"
    if isinstance(value, Quantiles):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False))


def group_lines(groups: list[selection.SelectedGroup], look: Look) -> Iterator[Line]:
    """A table of groups, the first of many."""
    header = ("por", "trajectories", "tokens_flat", "tokens_tree", "rewards", "group_id")
    shown = groups if look.full else groups[:GROUPS]
    table = [
        (
            _text("por", group.por),
            f"{group.num_trajectories:,}",
            f"{group.tokens_flat:,}",
            f"{group.tokens_tree:,}",
            str(spread(group.reward) or "-"),
        )
        for group in shown
    ]
    widths = [max(len(row[i]) for row in [header, *table]) for i in range(5)]
    pad = [f"{{:>{width}}}" for width in widths]
    yield (
        StyledText(
            "  ".join(form.format(cell) for form, cell in zip(pad, header, strict=False)) + "  group_id", "faint"
        ),
    )
    for row, group in zip(table, shown, strict=True):
        figures = "  ".join(form.format(cell) for form, cell in zip(pad, row, strict=True))
        yield StyledText(figures + "  "), StyledText(printable(group.group_id), "name")
    if len(groups) > len(shown):
        yield (StyledText(f"... {len(groups) - len(shown):,} more groups", "faint"),)
    yield (StyledText("choose one with --group ID", "faint"),)


def as_json(view: View, decoder: Decoder | None) -> dict[str, Any]:
    """The facts and every node with its segments of equal loss weight, of which nothing is left out."""
    forest = view.forest
    ending = forest.endings
    nodes = []
    for node in range(forest.num_nodes):
        record: dict[str, Any] = {
            "node": node,
            "parent": int(forest.parent[node]),
            "first_token": int(forest.start[node]),
            "position": int(forest.depth[node]),
            "num_tokens": int(forest.size[node]),
            "subtree_end": int(forest.start[forest.node_end[node]]),
            "num_trajectories": int(forest.num_passing[node]),
            "segments": [],
            "ends": [
                {
                    "trajectory_id": ending.trajectory_ids[i],
                    "reward": _known(ending.reward[i]),
                    "advantage": _known(ending.advantage[i]),
                }
                for i in ending.within(node, node + 1)
            ],
        }
        for segment in segments(forest, node, most=forest.loss_weight.size):
            ids = forest.tokens[segment.first : segment.stop].tolist()
            entry: dict[str, Any] = {"loss_weight": segment.low, "input_ids": ids}
            if decoder is not None:
                own = forest.tokens[forest.start[node] : segment.first].tolist()
                before = (forest.path_before(node, CONTEXT) + own)[-CONTEXT:]
                entry["text"] = "".join(piece.text for piece in decoder.pieces(ids, before))
            record["segments"].append(entry)
        nodes.append(record)
    facts = {name: asdict(value) if isinstance(value, Quantiles) else value for name, value in view.facts.items()}
    return {"kind": view.kind, **facts, "nodes": nodes}
