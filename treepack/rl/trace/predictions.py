"""Predicted values of prompts and prefixes: one file, JSON lines or Parquet, matched to the rollouts of a trie.

    {"group_id": "task-7", "value": 0.31}                                               a prompt
    {"group_id": "task-7", "trajectory_id": "task-7/2", "turn": 3, "value": 0.55}       a prefix: after its 3rd turn

A value is the predicted chance that a rollout from there on succeeds. A prompt's line may give `max_rollouts` too, the
most that it is to get. Other fields are left alone. Turns are the segments of a trajectory, counted from 1; a prefix
after the last one is the whole rollout and has no line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.records import Record, read_records
from treepack.rl.trace.targets import Anchors, Correlation, recursive_targets, spearman
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a file of predictions holds. `path` names it in messages.

    `group_ids` ascend, with `root_value` float64 and `max_rollouts` int64 (the largest integer where none is given),
    all [num_prompts]. `prefix_value` is by trajectory and turn, `prefix_group` the group named beside them.
    """

    path: str
    group_ids: list[str]
    root_value: Float64
    max_rollouts: Int64
    prefix_value: dict[tuple[str, int], float]
    prefix_group: dict[tuple[str, int], str]


def read_predictions(path: str | Path) -> Predictions:
    """Read a file of predictions, JSON lines or Parquet, also compressed.

    Raises:
        TreepackError: unreadable, a field missing or of the wrong kind, a value outside 0 .. 1, or an anchor twice.
    """
    roots: dict[str, tuple[float, int]] = {}
    prefixes: dict[tuple[str, int], float] = {}
    groups: dict[tuple[str, int], str] = {}
    for record in read_records(str(path)):
        group, value = _text(record, "group_id"), _value(record)
        turn = record.value.get("turn")
        if isinstance(turn, float) and math.isnan(turn):  # what some writers of Parquet make of a missing integer
            record.value["turn"] = turn = None
        if record.value.get("trajectory_id") is None and not turn:
            twice = group in roots
            roots[group] = value, _most(record)
        else:
            key = _text(record, "trajectory_id"), _count(record, "turn", 1)
            twice = key in prefixes
            prefixes[key], groups[key] = value, group
        if twice:
            raise TreepackError(f"{record.source}: predicts what an earlier line predicts too; keep one of them")
    ids = sorted(roots)
    return Predictions(
        str(path),
        ids,
        np.array([roots[name][0] for name in ids], np.float64),
        np.array([roots[name][1] for name in ids], np.int64),
        prefixes,
        groups,
    )


def _text(record: Record, name: str) -> str:
    found = record.value.get(name)
    if type(found) not in (str, int):
        raise TreepackError(f"{record.source}: {name} is {_shown(found)}; expected a string")
    return str(found)


def _value(record: Record) -> float:
    found = record.value.get("value")
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= 1:
        raise TreepackError(f"{record.source}: value is {_shown(found)}; expected a chance of success in 0 .. 1")
    return float(found)


def _count(record: Record, name: str, least: int) -> int:
    found = record.value.get(name)
    if isinstance(found, float) and found.is_integer():
        found = int(found)  # a column of integers with missing ones, as pandas writes it
    if type(found) is not int or not least <= found < 2**63:
        raise TreepackError(f"{record.source}: {name} is {_shown(found)}; expected an integer of {least} or more")
    return found


def _most(record: Record) -> int:
    if record.value.get("max_rollouts") is None:
        return int(np.iinfo(np.int64).max)
    return _count(record, "max_rollouts", 0)


def _shown(found: Any) -> str:
    return "missing" if found is None else repr(found)[:40]


def prefix_values(predictions: Predictions, trie: Trie, found: Anchors) -> Float64:
    """The predicted value of every anchor of `trie`, float64 [num_anchors].

    Raises:
        TreepackError: an anchor without a prediction, a prediction without its anchor, or one of another group.
    """
    keys, value = _matched(predictions, trie, found)
    of_turns = "predict on this trie, with the same --segment"
    missing = np.flatnonzero(np.isnan(value))
    if len(missing):
        name, turn = keys[missing[0]]
        raise TreepackError(
            f"{predictions.path}: {len(missing):,} of the trie's {len(keys):,} prefixes have no value, the first "
            f"is turn {turn} of trajectory {name!r}; {of_turns}"
        )
    strange = sorted(set(predictions.prefix_value).difference(keys))
    if strange:
        raise TreepackError(
            f"{predictions.path}: {len(strange):,} of {len(predictions.prefix_value):,} values are of prefixes that "
            f"the trie does not have, the first is turn {strange[0][1]} of trajectory {strange[0][0]!r}; {of_turns}"
        )
    return value


def _matched(predictions: Predictions, trie: Trie, found: Anchors) -> tuple[list[tuple[str, int]], Float64]:
    """Trajectory id and turn of every anchor, and its predicted value, NaN where there is none."""
    ids: list[str] = trie.trajectories["trajectory_id"].to_pylist()
    groups: list[str] = trie.trajectories["group_id"].to_pylist()
    keys = [(ids[i], t) for i, t in zip(found.trajectory.tolist(), found.turn.tolist(), strict=True)]
    for i, key in zip(found.trajectory.tolist(), keys, strict=True):
        if predictions.prefix_group.get(key, groups[i]) != groups[i]:
            raise TreepackError(
                f"{predictions.path}: trajectory {key[0]!r} is of group {predictions.prefix_group[key]!r} there and "
                f"of {groups[i]!r} in the trie; predict on this trie"
            )
    return keys, np.array([predictions.prefix_value.get(key, math.nan) for key in keys], np.float64)


def _root_values(predictions: Predictions, trie: Trie, found: Anchors) -> Float64:
    """The predicted value of every group of `trie`, by its code, NaN where there is none; float64 [num_groups].

    Raises:
        TreepackError: a group_id occurs in several steps.
    """
    names = group_ids(trie, found)
    if len(set(names)) < len(names):
        raise TreepackError(
            f"{predictions.path}: holds one value per group_id and the trie has several training steps of one; "
            "build a trie of one step"
        )
    known = dict(zip(predictions.group_ids, predictions.root_value.tolist(), strict=True))
    return np.array([known.get(name, math.nan) for name in names], np.float64)


def group_ids(trie: Trie, found: Anchors) -> list[str]:
    """The group_id of each group of `found`, by its code."""
    first = np.unique(found.group, return_index=True)[1]
    names: list[str] = trie.trajectories["group_id"].take(first).to_pylist()
    return names


def correlations(predictions: Predictions, trie: Trie, found: Anchors, reward: Float64) -> dict[str, Correlation]:
    """How well the predictions rank the recursive targets: TRACE, equation 22, at each level that they speak of.

    "root" is over groups, "prefix" over nodes, each the mean of what is predicted for its occurrences; "shared prefix"
    is over those nodes that two or more trajectories share, whose targets are more than one rollout's reward. Groups
    and nodes without any prediction are left out and counted: predictions made before prefixes were continued are
    judged by the trie of rollouts and continuations.

    Raises:
        TreepackError: no prediction of a level is of this trie, one is of another group, or scipy is not installed.
    """
    tree = found.tree
    target, below = recursive_targets(tree, reward)
    levels = {}
    if predictions.group_ids:
        value = _root_values(predictions, trie, found)
        _refuse_strange(predictions, value, "groups")
        levels["root"] = _ranked(value, target[: tree.num_groups])
    if predictions.prefix_value:
        of_anchor = _matched(predictions, trie, found)[1]
        _refuse_strange(predictions, of_anchor, "prefixes")
        nodes = np.unique(found.node)
        value = _means_of_known(of_anchor, found.node, tree.num_inner)
        for name, some in (("prefix", nodes), ("shared prefix", nodes[below[nodes] > 1])):
            levels[name] = _ranked(value[some], target[some])
    return levels


def _refuse_strange(predictions: Predictions, value: Float64, what: str) -> None:
    if np.isnan(value).all():
        raise TreepackError(
            f"{predictions.path}: predicts none of the trie's {len(value):,} {what}; predict on its rollouts, with the "
            "same --segment"
        )


def _means_of_known(value: Float64, part: Int64, num_parts: int) -> Float64:
    """Mean of the `value` of each part that are no NaN, NaN where all are."""
    known = ~np.isnan(value)
    count = np.bincount(part[known], minlength=num_parts)
    total = np.bincount(part[known], weights=value[known], minlength=num_parts)
    found: Float64 = np.divide(total, count, out=np.full(num_parts, math.nan), where=count > 0)
    return found


def _ranked(value: Float64, target: Float64) -> Correlation:
    known = ~np.isnan(value)
    return spearman(value[known], target[known])._replace(num_unpredicted=int((~known).sum()))
