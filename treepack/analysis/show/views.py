"""The views of `treepack show`: a group's tree, a trajectory or a packed row, with facts about it, as lines or JSON.

    Trie, Trajectory, Row --> ForestView(facts, forest) --lines--> Text, Text, ...
                                                  --view_as_json--> {"kind": ..., facts, "nodes": [...]}

Facts have the names that `treepack stats --json` and the columns on disk use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from treepack.analysis.part_notes import part_notes
from treepack.analysis.show import selection
from treepack.analysis.show.bodies import DrawingOptions, segments
from treepack.analysis.show.decoding import CONTEXT, TokenDecoder
from treepack.analysis.show.drawing import draw_trees, path_lines, row_lines
from treepack.analysis.show.figures import ValueRange, spread
from treepack.analysis.show.forest import (
    DrawnForest,
    forest_of_row,
    forest_of_trajectory,
    forest_of_trie,
    num_trained_runs,
    path_of_row,
    path_of_trie,
)
from treepack.analysis.show.wrapping import FAINT, NAME, escape_text, shorten, table_lines
from treepack.files.manifest import Manifest
from treepack.pack.row import Row
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie, trajectories_of

_GROUPS = 10  # groups listed below the first one, which leaves room for its tree on a screen
_NAMES = ("trajectory_id", "group_id", "source")  # never shortened, because a user copies them for the next command
_MIN_FACT = 10  # columns of a value, even if its name leaves fewer
_GAP = "   "  # between two facts on a line


@dataclass(frozen=True, slots=True)
class ForestView:
    """A forest of a `kind`, "tree", "trajectory" or "row", and the facts printed above it; None is unknown."""

    kind: str
    facts: dict[str, Any]
    forest: DrawnForest


def group_view(trie: Trie, group_id: str, *, where: str) -> ForestView:
    """Return the tree of one group alone; prefixes that it shares with other groups are not counted as overlap.

    Raises:
        TreepackError: the group does not exist.
    """
    members = selection.members(trie, group_id, where=where)
    tree = build_trie(trajectories_of(selection.subset(trie, members)), share=trie.share)
    forest = forest_of_trie(tree)
    facts = {
        "group_id": group_id,
        "num_trajectories": tree.num_trajectories,
        "num_trees": tree.num_trees,
        "num_nodes": tree.num_nodes,
        "tokens_flat": tree.tokens_flat,
        "tokens_tree": tree.tokens_tree,
        "por": 1 - tree.tokens_tree / tree.tokens_flat,
        "rewards": spread(forest.endings.reward),
    }
    return ForestView("tree", facts, forest)


def trajectory_views(trie: Trie, wanted: str, *, where: str) -> Iterator[ForestView]:
    """Yield the trajectories of a trie that `wanted` names, with the number that share each part of their paths.

    Raises:
        TreepackError: `wanted` names no trajectory.
    """
    notes = part_notes(trie)
    for i in selection.trajectories(trie, wanted, where=where):
        (trajectory,) = trajectories_of(selection.subset(trie, [i]))
        facts = {**_facts(trajectory), **({"part": notes[i]} if notes[i] else {})}
        yield ForestView("trajectory", facts, path_of_trie(trie, trajectory, int(trie.end_node[i])))


def rollout_view(trajectory: Trajectory) -> ForestView:
    """Return the view of one tokenised rollout."""
    return ForestView("trajectory", _facts(trajectory), forest_of_trajectory(trajectory))


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    forest = forest_of_trajectory(trajectory)
    trained = forest.loss_weight != 0
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "step": trajectory.step,
        "num_tokens": len(forest.tokens),
        "tokens_trained": int(trained.sum()),
        "num_turns": num_trained_runs(forest.loss_weight),
        "weight": trajectory.weight,
        "reward": trajectory.reward,
        "advantage": trajectory.advantage,
        **({} if trajectory.temperature is None else {"temperature": trajectory.temperature}),
        "source": trajectory.source,
        "metadata": trajectory.metadata or None,
        "notes": "; ".join(trajectory.notes) or None,
    }


def row_view(row: Row, manifest: Manifest) -> ForestView:
    """Return the view of a packed row."""
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
    return ForestView("row", facts, forest)


def row_trajectory_view(row: Row, trajectory: int) -> ForestView:
    """Return the view of one trajectory of a packed row.

    Without terms, a shared token has the sum of the weights of all trajectories that share it.
    """
    forest = path_of_row(row, trajectory)
    facts = {
        "trajectory_id": row.trajectory_ids[trajectory],
        "group_id": row.trajectory_groups[trajectory],
        "row_id": row.row_id,
        "step": row.step,
        "num_tokens": len(forest.tokens),
        "tokens_trained": int((forest.loss_weight != 0).sum()),
        "reward": _or_none(forest.endings.reward[0]),
        "advantage": _or_none(forest.endings.advantage[0]),
        "notes": "weights include all trajectories of the row that share a token" if row.terms is None else None,
    }
    return ForestView("trajectory", facts, forest)


def _or_none(value: float) -> float | None:
    """Return `value`, or None for NaN, which JSON cannot write."""
    return None if np.isnan(value) else float(value)


def lines(view: ForestView, look: DrawingOptions) -> Iterator[Text]:
    """Yield the facts, a blank line, and the drawing."""
    yield from _fact_lines(view.facts, look)
    yield Text()
    draw = {"tree": draw_trees, "trajectory": path_lines, "row": row_lines}[view.kind]
    yield from draw(view.forest, look)


def _fact_lines(facts: dict[str, Any], look: DrawingOptions) -> Iterator[Text]:
    """Yield names and values, as many on a line as fit."""
    line = Text()
    for name, value in facts.items():
        if value is None or (name, value) == ("weight", 1):  # unknown, or the default
            continue
        text = _text(name, value)
        if name not in _NAMES:
            text = shorten(text, max(_MIN_FACT, look.width - len(name) - 1))
        # rich.columns.Columns would align the facts in a grid, which is as wide as the longest id.
        fact = Text.assemble((f"{name} ", FAINT), (text, NAME))
        if line and line.cell_len + len(_GAP) + fact.cell_len > look.width:
            yield line
            line = Text()
        line = Text(_GAP).join([line, fact]) if line else fact
    yield line


def _text(name: str, value: Any) -> str:
    if name == "por":
        return f"{100 * value:.1f} %"
    if isinstance(value, ValueRange):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    # Metadata is JSON of a rollout; sorted keys, because the order of the input means nothing.
    return escape_text(value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False))


def group_lines(groups: list[selection.SelectedGroup], look: DrawingOptions) -> Iterator[Text]:
    """Yield a table of groups: the first of them, or all if `look.full` is set. 0.3 ms a group."""
    groups_drawn = groups if look.full else groups[:_GROUPS]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=FAINT)
    for name in "por trajectories tokens_flat tokens_tree rewards".split():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("group_id", no_wrap=True, style=NAME)
    for group in groups_drawn:
        table.add_row(
            _text("por", group.por),
            f"{group.num_trajectories:,}",
            f"{group.tokens_flat:,}",
            f"{group.tokens_tree:,}",
            str(spread(group.reward) or "-"),
            Text(escape_text(group.group_id)),  # a string would be read as markup
        )
    yield from table_lines(table)
    if len(groups) > len(groups_drawn):
        yield Text(f"... {len(groups) - len(groups_drawn):,} more groups", FAINT)
    yield Text("choose one with --group ID", FAINT)


def view_as_json(view: ForestView, decoder: TokenDecoder | None) -> dict[str, Any]:
    """Return the facts and every node with its segments of equal loss weight, as plain values; nothing is left out."""
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
                    "reward": _or_none(ending.reward[i]),
                    "advantage": _or_none(ending.advantage[i]),
                    **({"note": ending.notes[i]} if ending.notes and ending.notes[i] else {}),
                }
                for i in ending.within(node, node + 1)
            ],
        }
        # A run has no more segments than tokens, so with this limit none of them are merged.
        for segment in segments(forest, node, most=forest.loss_weight.size):
            ids = forest.tokens[segment.first : segment.stop].tolist()
            entry: dict[str, Any] = {"loss_weight": segment.low, "input_ids": ids}
            if decoder is not None:
                in_node = forest.tokens[forest.start[node] : segment.first].tolist()
                before = (forest.path_before(node, CONTEXT) + in_node)[-CONTEXT:]
                entry["text"] = "".join(token.text for token in decoder.decode(ids, before))
            record["segments"].append(entry)
        nodes.append(record)
    facts = {name: asdict(value) if isinstance(value, ValueRange) else value for name, value in view.facts.items()}
    return {"kind": view.kind, **facts, "nodes": nodes}
