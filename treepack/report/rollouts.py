"""The rollouts that the trajectories of a trie are samples of, their short names, and the outcomes of each group.

    Trie --sorted_rollouts--> SortedRollouts      SharedParts, SortedRollouts --outcomes_of--> PartOutcomes
    Trie --explorer_parts--> ExplorerParts        all lists of the explorer

The names `<rollout>/turn-<k>` and `<rollout>/part-<k>` mark the samples of one rollout. Rewards belong to rollouts, so
a rollout with many turns counts once, like one with few.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.analysis.lost_sharing import CALL
from treepack.files.metadata import parse_metadata
from treepack.report.parts import SharedParts, groups_of, mean_by, rewards_of, trees_of
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie

# Facts in which the rollouts of a group may differ, by their usual keys.
_FACTS = ("model", "model_name", "agent", "run", "run_id", "temperature", "seed")
_MAX_FACT = 28  # characters of a fact in a name
_NAME_PARTS = re.compile(r"[^/:|\s]+")


@dataclass(frozen=True, slots=True)
class SortedRollouts:
    """Rollouts in the order of step, group and name.

    `of` int64 [num_trajectories] is the rollout of each trajectory, `number` int64 [num_trajectories] the number of its
    turn or part, 0 if it has none. `names` are whole names; `labels` are the parts that differ inside a group. `reward`
    float64 [num_rollouts] is the mean of the known rewards of its trajectories, else NaN.
    """

    of: Int64
    number: Int64
    names: list[str]
    labels: list[str]
    reward: Float64


@dataclass(frozen=True, slots=True)
class PartOutcomes:
    """Outcomes by part: the number of rollouts, the standard deviation of their rewards, whether all are the same.

    `num_rollouts` int64, `spread` float64 (0 if fewer than two rewards are known), and `is_one` bool: several rollouts,
    whose rewards are all known and equal.
    """

    num_rollouts: Int64
    spread: Float64
    is_one: NDArray[np.bool_]

    def most_mixed(self, overlap: Float64) -> int:
        """Return the part with the largest spread; of several, the one with the largest overlap."""
        return int(np.lexsort((-overlap, -np.round(self.spread, 9)))[0])


@dataclass(frozen=True, slots=True)
class ExplorerParts:
    """The lists of the explorer: rollouts, and groups and trees with their outcomes."""

    rollouts: SortedRollouts
    groups: SharedParts
    group_outcomes: PartOutcomes
    trees: SharedParts
    tree_outcomes: PartOutcomes

    @property
    def opened_group(self) -> int:
        """The group with the largest spread of rewards, which the page opens and the picture of a tree shows."""
        return self.group_outcomes.most_mixed(self.groups.overlap)


def explorer_parts(trie: Trie) -> ExplorerParts:
    """Return the lists of the explorer of `trie`."""
    rollouts, groups, trees = sorted_rollouts(trie), groups_of(trie), trees_of(trie)
    return ExplorerParts(rollouts, groups, outcomes_of(groups, rollouts), trees, outcomes_of(trees, rollouts))


def sorted_rollouts(trie: Trie) -> SortedRollouts:
    """Return the rollouts of the trajectories of `trie`."""
    table = trie.trajectories
    keys, numbers = [], []
    for step, group, name in zip(
        trie.step_rank.tolist(), table["group_id"].to_pylist(), table["trajectory_id"].to_pylist(), strict=True
    ):
        match = CALL.fullmatch(name)  # "task/0/turn-3" -> rollout "task/0", number 3
        keys.append((step, group, match["rollout"] if match else name))
        numbers.append(int(match["number"]) if match else 0)
    order = sorted(set(keys))
    rank = {key: i for i, key in enumerate(order)}
    of = np.array([rank[key] for key in keys], np.int64)
    _, first = np.unique(of, return_index=True)
    metadata, sources = (table[name].to_pylist() for name in ("metadata", "source"))
    temperatures = table["temperature"].to_pylist() if "temperature" in table.column_names else [None] * len(of)
    members = defaultdict(list)
    for i, (step, group, _) in enumerate(order):
        members[step, group].append(i)
    labels = [""] * len(order)
    for rollouts in members.values():
        facts = [_facts(metadata[first[i]], sources[first[i]], temperatures[first[i]]) for i in rollouts]
        for i, label in zip(rollouts, short_names([order[i][2] for i in rollouts], facts), strict=True):
            labels[i] = label
    return SortedRollouts(
        of=of,
        number=np.array(numbers, np.int64),
        names=[name for _, _, name in order],
        labels=labels,
        reward=mean_by(of, rewards_of(trie), len(order)),
    )


def outcomes_of(parts: SharedParts, rollouts: SortedRollouts) -> PartOutcomes:
    """Return the outcomes of the rollouts of each part."""
    count, size = len(parts.names), len(rollouts.names)
    # One number for each pair of part and rollout, as a rollout may be in several trees: part 2, rollout 1 of 10 -> 21
    pairs = np.unique(parts.of * size + rollouts.of)
    part, reward = pairs // size, rollouts.reward[pairs % size]
    num_rollouts = np.bincount(part, minlength=count)
    known = ~np.isnan(reward)
    num_known = np.bincount(part, known, count)
    mean = mean_by(part, reward, count)
    squares = np.bincount(part[known], (reward[known] - mean[part[known]]) ** 2, count)
    spread = np.sqrt(squares / np.maximum(num_known, 1))
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    # `at`, because np.minimum with an index keeps only the last value of each part.
    np.minimum.at(low, part[known], reward[known])
    np.maximum.at(high, part[known], reward[known])
    is_one = (num_known == num_rollouts) & (num_rollouts > 1) & (low == high)
    return PartOutcomes(num_rollouts.astype(np.int64), np.where(is_one, 0.0, spread), is_one)


def short_names(names: Sequence[str], facts: Sequence[dict[str, str]]) -> list[str]:
    """Return the parts in which the names differ, after the facts that differ.

    ["run/a/task-1", "run/b/task-1"] -> ["a", "b"]; with the models x and y -> ["x a", "y b"].
    """
    differing = [key for key in _FACTS if len({fact.get(key, "") for fact in facts}) > 1]
    parts = [_NAME_PARTS.findall(name) or [name] for name in names]
    start, end = _common(parts), _common([part[::-1] for part in parts])
    labels = []
    for part, fact in zip(parts, facts, strict=True):
        own = part[start : max(start, len(part) - end)] if len(parts) > 1 else part[-1:]
        label = "/".join(own) or part[-1]
        label = f"#{label}" if label.isdecimal() and len(label) < 4 else label
        values = [fact[key] for key in differing if key in fact]
        labels.append(" ".join([*(value for value in values if value not in own), label]))
    return labels


def _common(parts: Sequence[Sequence[str]]) -> int:
    """Return the number of elements that all `parts` begin with."""
    size = min(len(part) for part in parts)
    return next((i for i in range(size) if len({part[i] for part in parts}) > 1), size)


def _facts(metadata: str, source: str, temperature: float | None) -> dict[str, str]:
    """Return the short facts in the metadata of a trajectory, which are a JSON object, and its temperature."""
    fields: dict[str, Any] = parse_metadata(metadata, source)
    if temperature is not None:
        fields["temperature"] = temperature
    values = {key: fields[key] for key in _FACTS if isinstance(fields.get(key), str | int | float)}
    return {key: str(value) for key, value in values.items() if len(str(value)) <= _MAX_FACT}
