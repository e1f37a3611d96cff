"""Predicted values of prompts and prefixes: one file, JSON lines or Parquet, matched to the rollouts of a trie.

    {"group_id": "task-7", "value": 0.31}                                               a prompt
    {"group_id": "task-7", "trajectory_id": "task-7/2", "turn": 3, "value": 0.55}       a prefix: after its 3rd turn

A value is the predicted chance that a rollout that starts there succeeds. The line of a prompt may also have
`max_rollouts`, the maximum number of its rollouts. Other fields are ignored. Turns are the segments of a trajectory,
counted from 1. The prefix after the last turn is the whole rollout and has no line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.files.remote.address import AnyPath
from treepack.ingest.readers.fields.rollout_facts import GROUPS
from treepack.ingest.readers.fields.values import as_id, as_integer, shown
from treepack.research.trace.targets import RankCorrelation, TurnPrefixes, recursive_targets, spearman
from treepack.rl.leaf_weights import leaf_weights
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class ValuePredictions:
    """The content of a file of predictions; messages name the file by `path`.

    `group_ids` ascend, with `root_value` float64 and `max_rollouts` int64 (the largest integer if the line has none),
    all [num_prompts]. `prefix_value` maps trajectory id and turn to the value, `prefix_group` to the group_id.
    """

    path: str
    group_ids: list[str]
    root_value: Float64
    max_rollouts: Int64
    prefix_value: dict[tuple[str, int], float]
    prefix_group: dict[tuple[str, int], str]


def read_predictions(path: str | AnyPath) -> ValuePredictions:
    """Read a file of predictions, JSON lines or Parquet, also compressed.

    Raises:
        TreepackError: unreadable file, a field missing or of the wrong type, a value outside 0 .. 1, or two lines for
            one prompt or prefix.
    """
    roots: dict[str, tuple[float, int]] = {}
    prefixes: dict[tuple[str, int], float] = {}
    groups: dict[tuple[str, int], str] = {}
    if Path(str(path)).is_dir():
        raise TreepackError(
            f"{path}: is a directory; give a file of predictions, JSON lines or Parquet, such as treepack values "
            "predict writes"
        )
    for record in read_records(str(path)):
        name, source = _group_name(record), record.source
        group, value = str(as_id(record.value.get(name), source=source, name=name)), _value(record)
        trajectory, turn = record.value.get("trajectory_id"), record.value.get("turn")
        if isinstance(turn, float) and math.isnan(turn):  # some Parquet writers store a missing integer as NaN
            turn = None
        if trajectory is None and not turn:
            is_duplicate = group in roots
            roots[group] = value, _max_rollouts(record)
        else:
            number = as_integer(turn, source=source, name="turn", minimum=1)
            key = str(as_id(trajectory, source=source, name="trajectory_id")), number
            is_duplicate = key in prefixes
            prefixes[key], groups[key] = value, group
        if is_duplicate:
            raise TreepackError(f"{record.source}: an earlier line has the same prompt or prefix; keep one of them")
    ids = sorted(roots)
    return ValuePredictions(
        str(path),
        ids,
        np.array([roots[name][0] for name in ids], np.float64),
        np.array([roots[name][1] for name in ids], np.int64),
        prefixes,
        groups,
    )


def _group_name(record: Record) -> str:
    """Return the field with the group: `group_id`, or another of the names that rollouts have for it."""
    return next((name for name in ("group_id", *GROUPS) if record.value.get(name) is not None), "group_id")


def _value(record: Record) -> float:
    value = record.value.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise TreepackError(f"{record.source}: value is {shown(value)}; expected a chance of success in 0 .. 1")
    return float(value)


def _max_rollouts(record: Record) -> int:
    if record.value.get("max_rollouts") is None:
        return int(np.iinfo(np.int64).max)
    return as_integer(record.value["max_rollouts"], source=record.source, name="max_rollouts", minimum=0)


def prefix_values(predictions: ValuePredictions, trie: Trie, prefixes: TurnPrefixes) -> Float64:
    """Return the predicted value of every prefix of `trie`, float64 [num_anchors].

    Raises:
        TreepackError: a prefix without a prediction, a prediction without its prefix, or one with another group.
    """
    keys, value = _match(predictions, trie, prefixes)
    remedy = "predict on this trie, with the same --segment"
    missing = np.flatnonzero(np.isnan(value))
    if len(missing):
        name, turn = keys[missing[0]]
        raise TreepackError(
            f"{predictions.path}: {len(missing):,} of the trie's {len(keys):,} prefixes have no value, the first "
            f"is turn {turn} of trajectory {name!r}; {remedy}"
        )
    unknown = sorted(set(predictions.prefix_value).difference(keys))
    if unknown:
        raise TreepackError(
            f"{predictions.path}: {len(unknown):,} of {len(predictions.prefix_value):,} values belong to prefixes that "
            f"the trie does not have, the first is turn {unknown[0][1]} of trajectory {unknown[0][0]!r}; {remedy}"
        )
    return value


def _match(predictions: ValuePredictions, trie: Trie, prefixes: TurnPrefixes) -> tuple[list[tuple[str, int]], Float64]:
    """Return trajectory id and turn of every prefix, and its predicted value or NaN.

    Raises:
        TreepackError: a prediction names another group than the trie.
    """
    ids: list[str] = trie.trajectories["trajectory_id"].to_pylist()
    groups: list[str] = trie.trajectories["group_id"].to_pylist()
    keys = [(ids[i], t) for i, t in zip(prefixes.trajectory.tolist(), prefixes.turn.tolist(), strict=True)]
    for i, key in zip(prefixes.trajectory.tolist(), keys, strict=True):
        if predictions.prefix_group.get(key, groups[i]) != groups[i]:
            raise TreepackError(
                f"{predictions.path}: trajectory {key[0]!r} has the group {predictions.prefix_group[key]!r} there and "
                f"{groups[i]!r} in the trie; predict on this trie"
            )
    return keys, np.array([predictions.prefix_value.get(key, math.nan) for key in keys], np.float64)


def _root_values(predictions: ValuePredictions, trie: Trie, prefixes: TurnPrefixes) -> Float64:
    """Return the predicted value of every group of `trie`, by its code, or NaN; float64 [num_groups].

    Raises:
        TreepackError: a group_id occurs in several steps.
    """
    names = group_ids(trie, prefixes)
    if len(set(names)) < len(names):
        raise TreepackError(
            f"{predictions.path}: has one value per group_id and the trie has several training steps of one; "
            "build a trie of one step"
        )
    known = dict(zip(predictions.group_ids, predictions.root_value.tolist(), strict=True))
    return np.array([known.get(name, math.nan) for name in names], np.float64)


def group_ids(trie: Trie, prefixes: TurnPrefixes) -> list[str]:
    """Return the group_id of each group of `prefixes`, by its code."""
    # The first trajectory of each code: group [0, 0, 1, 1] -> first [0, 2].
    first = np.unique(prefixes.group, return_index=True)[1]
    names: list[str] = trie.trajectories["group_id"].take(first).to_pylist()
    return names


def correlations(
    predictions: ValuePredictions, trie: Trie, prefixes: TurnPrefixes, reward: Float64
) -> dict[str, RankCorrelation]:
    """Rank correlation of the predictions and the recursive targets, at each predicted level: TRACE, equation 22.

    "root" compares groups. "prefix" compares nodes; the prediction of a node is the mean over its occurrences. "shared
    prefix" compares only nodes with two or more trajectories, whose targets are more than one reward. Targets are
    weighted if the trie has leaf weights. Groups and nodes without any prediction are left out and counted, so the trie
    may also contain continuations that were sampled after the predictions were made.

    Raises:
        TreepackError: all predictions of a level belong to another trie, one has another group, or scipy is not
            installed.
    """
    tree = prefixes.tree
    target, num_below = recursive_targets(tree, reward, leaf_weights(trie))
    levels = {}
    if predictions.group_ids:
        value = _root_values(predictions, trie, prefixes)
        _check_any_known(predictions, value, "groups")
        levels["root"] = _rank_correlation(value, target[: tree.num_groups])
    if predictions.prefix_value:
        per_occurrence = _match(predictions, trie, prefixes)[1]
        _check_any_known(predictions, per_occurrence, "prefixes")
        nodes = np.unique(prefixes.node)
        value = _means_of_known(per_occurrence, prefixes.node, tree.num_inner)
        for name, subset in (("prefix", nodes), ("shared prefix", nodes[num_below[nodes] > 1])):
            levels[name] = _rank_correlation(value[subset], target[subset])
    return levels


def _check_any_known(predictions: ValuePredictions, value: Float64, what: str) -> None:
    if np.isnan(value).all():
        raise TreepackError(
            f"{predictions.path}: predicts none of the trie's {len(value):,} {what}; predict on its rollouts, with the "
            "same --segment"
        )


def _means_of_known(value: Float64, part: Int64, num_parts: int) -> Float64:
    """Mean of the `value` of each part without its NaNs, NaN if there is nothing else."""
    # value [0.6, NaN, NaN], part [0, 0, 1] -> [0.6, NaN]
    known = ~np.isnan(value)
    count = np.bincount(part[known], minlength=num_parts)
    total = np.bincount(part[known], weights=value[known], minlength=num_parts)
    mean: Float64 = np.divide(total, count, out=np.full(num_parts, math.nan), where=count > 0)
    return mean


def _rank_correlation(value: Float64, target: Float64) -> RankCorrelation:
    known = ~np.isnan(value)
    return spearman(value[known], target[known])._replace(num_unpredicted=int((~known).sum()))
